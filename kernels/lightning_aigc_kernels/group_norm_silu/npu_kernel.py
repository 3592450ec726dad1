"""GroupNorm with SiLU by torch_npu's `npu_group_norm_swish` and its gradient.

The operator takes a weight and a bias in x's dtype, no timestep scale or shift, and for the gradient at most 4000
channels a group; its statistics are in x's dtype. In half precision this rounding makes the gradient's error 1.6 times
that of float32 statistics, so there it serves where no Triton kernel runs. Source: op-plugin's `derivatives.yaml` and
`docs/zh/custom_APIs/torch_npu/torch_npu-npu_group_norm_swish.md`, which leaves NaN and infinity in x undefined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_aigc_kernels.dispatch import KERNEL_DTYPES, cast, has_npu_ops, why_no_kernel
from lightning_aigc_kernels.group_norm_silu.affine import NormSiLU

OPS = ("npu_group_norm_swish", "npu_group_norm_swish_grad")
MOST_CHANNELS = 4000
"""Channels of a group that the gradient takes."""
DIMENSIONS = range(2, 9)


def serves(x: Tensor, norm: NormSiLU) -> bool:
    """Whether torch_npu computes this norm, and no other kernel does it more exactly."""
    if x.device.type != "npu" or x.dtype not in KERNEL_DTYPES or not has_npu_ops(*OPS):
        return False
    if x.dim() not in DIMENSIONS or x.numel() == 0 or x.shape[1] // norm.groups > MOST_CHANNELS:
        return False
    if not norm.silu or norm.weight is None or norm.bias is None or norm.scale is not None or norm.shift is not None:
        return False
    return x.dtype == torch.float32 or why_no_kernel("group_norm_silu") is not None


def forward(x: Tensor, norm: NormSiLU) -> tuple[Tensor, Tensor, Tensor]:
    """silu(GroupNorm(x)), mean_NG and rstd_NG, all in x's dtype."""
    weight_C, bias_C = _affine(x, norm)
    y, mean_NG, rstd_NG = torch.ops.npu.npu_group_norm_swish(
        x.contiguous(), norm.groups, weight_C, bias_C, norm.eps, 1.0
    )
    return y, mean_NG, rstd_NG


def backward(
    dy: Tensor, x: Tensor, mean_NG: Tensor, rstd_NG: Tensor, norm: NormSiLU, need_affine: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias; without `need_affine` the last two are None."""
    weight_C, bias_C = _affine(x, norm)
    dx, dweight_C, dbias_C = torch.ops.npu.npu_group_norm_swish_grad(
        dy.contiguous(), x.contiguous(), norm.groups, weight_C, bias_C, cast(mean_NG, x.dtype), cast(rstd_NG, x.dtype),
        [True, need_affine, need_affine], 1.0,
    )  # fmt: skip
    return (dx, dweight_C, dbias_C) if need_affine else (dx, None, None)


def _affine(x: Tensor, norm: NormSiLU) -> tuple[Tensor, Tensor]:
    assert norm.weight is not None and norm.bias is not None  # `serves` asked
    return cast(norm.weight, x.dtype).contiguous(), cast(norm.bias, x.dtype).contiguous()
