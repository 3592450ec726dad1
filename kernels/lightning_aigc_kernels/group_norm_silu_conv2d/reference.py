"""GroupNorm, SiLU and convolution in plain torch, with torch's autograd."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.group_norm_silu import reference as normalization


def group_norm_silu_conv2d(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    num_groups: int,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """conv2d(silu(group_norm(x) * (1 + scale) + shift))."""
    activated = normalization.group_norm_silu(
        x, norm_weight, norm_bias, num_groups, eps, scale=scale, shift=shift, silu=silu
    )
    return F.conv2d(activated, weight, bias, stride, padding, dilation, groups)
