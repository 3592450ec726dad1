"""GroupNorm with SiLU in plain torch, the reference of the kernels.

Dimensions: N samples, C channels, G groups.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_aigc_kernels.dispatch import cast
from lightning_aigc_kernels.group_norm_silu.affine import NormSiLU
from lightning_aigc_kernels.keep_largest.reference import keep_largest
from lightning_aigc_kernels.normalization import affine_for

aten = torch.ops.aten


def group_norm_silu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float = 1e-5,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """silu(group_norm(x) * (1 + scale) + shift), with torch's autograd."""
    y = F.group_norm(x, num_groups, weight, bias, eps)
    pixels = (1,) * (x.dim() - 2)
    if scale is not None:
        y = y * (1 + scale.view(*scale.shape, *pixels))
    if shift is not None:
        y = y + shift.view(*shift.shape, *pixels)
    return F.silu(y) if silu else y


def forward(x: Tensor, norm: NormSiLU) -> tuple[Tensor, Tensor, Tensor]:
    """act(GroupNorm(x) * (1 + scale) + shift), mean_NG and rstd_NG."""
    normalized, mean_NG, rstd_NG = _normalize(x, norm)
    y = _modulate(normalized, norm.scale, norm.shift)
    return (F.silu(y, inplace=True) if norm.silu else y), mean_NG, rstd_NG


def backward(
    dy: Tensor, x: Tensor, mean_NG: Tensor, rstd_NG: Tensor, norm: NormSiLU, need_affine: bool, density: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight, bias, scale and shift; without `need_affine` the last four are None."""
    weight_C, bias_C, scale_NC, shift_NC, groups, _, silu = norm
    need_scale = need_affine and scale_NC is not None
    x, dy = _dense(x), _dense(dy)
    gradient, dscale_NC, dshift_NC = dy, None, None
    if silu or need_scale:
        normalized = _normalize(x, norm)[0]
        if silu:
            activated = _modulate(normalized, scale_NC, shift_NC, may_overwrite=not need_scale)
            gradient = aten.silu_backward(dy.contiguous(memory_format=layout(activated)), activated)
        if need_scale:
            pixels = tuple(range(2, x.dim()))
            dscale_NC = (gradient * normalized).sum(pixels) if pixels else gradient * normalized
    if need_affine and shift_NC is not None:
        dshift_NC = gradient.sum(tuple(range(2, x.dim()))) if x.dim() > 2 else gradient.clone()
    if scale_NC is not None:
        gradient = gradient * (1 + _over_pixels(scale_NC, x))
    samples, channels = x.shape[:2]
    # On a CPU the channels_last backward of torch 2.13 takes 13 times as long: two copies are cheaper.
    weight_C = affine_for(weight_C, x)
    statistics_dtype = x.dtype if weight_C is None else weight_C.dtype
    statistics = cast(mean_NG, statistics_dtype), cast(rstd_NG, statistics_dtype)
    pixels_count = math.prod(x.shape[2:])
    mask = (True, need_affine and weight_C is not None, need_affine and bias_C is not None)
    dx, dweight_C, dbias_C = aten.native_group_norm_backward(
        gradient.contiguous(), x.contiguous(), *statistics, weight_C, samples, channels, pixels_count, groups, mask
    )
    if density < 1:
        dx = keep_largest(dx.reshape(samples * groups, -1), density).view_as(dx)
    return dx.contiguous(memory_format=layout(x)), dweight_C if mask[1] else None, dbias_C, dscale_NC, dshift_NC


def _normalize(x: Tensor, norm: NormSiLU) -> tuple[Tensor, Tensor, Tensor]:
    x = _dense(x)
    samples, channels = x.shape[:2]
    weight_C, bias_C = affine_for(norm.weight, x), affine_for(norm.bias, x)
    y, mean_NG, rstd_NG = aten.native_group_norm(
        x, weight_C, bias_C, samples, channels, math.prod(x.shape[2:]), norm.groups, norm.eps
    )
    return y, mean_NG, rstd_NG


def _modulate(y: Tensor, scale_NC: Tensor | None, shift_NC: Tensor | None, may_overwrite: bool = True) -> Tensor:
    if scale_NC is None and shift_NC is None:
        return y
    y = y if may_overwrite else y.clone()
    if scale_NC is not None:
        y.mul_(1 + _over_pixels(scale_NC, y))
    return y if shift_NC is None else y.add_(_over_pixels(shift_NC, y))


def _over_pixels(per_channel_NC: Tensor, x: Tensor) -> Tensor:
    return per_channel_NC.to(x.dtype).view(*per_channel_NC.shape, *(1,) * (x.dim() - 2))


def layout(x: Tensor) -> torch.memory_format:
    """The memory format of results computed from x: channels_last is preserved, others become contiguous.

    torch's GroupNorm reads channels_last on a CPU alone.
    """
    if x.device.type != "cpu":
        return torch.contiguous_format
    # The stride of a single sample is arbitrary, but GroupNorm treats x as channels_last only if it matches too.
    if is_channels_last(x) and suggest_memory_format(x) == torch.channels_last:
        return torch.channels_last
    return torch.contiguous_format


def is_channels_last(x: Tensor) -> bool:
    """Whether x [N, C, H, W] is dense in channels_last alone."""
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=layout(x))
