"""RMSNorm and rotary position embedding by torch_npu's `npu_rms_norm` and `npu_rotary_mul`, for npu without Triton.

Each reads and writes the tensor once, in float32, so that the result is rounded once as in the Triton kernel, which
makes one pass. Limits of the rotation of interleaved pairs: one table for all samples, fewer than 1000 heads of a
batch, fewer than 896 features. Source: op-plugin's `docs/zh/custom_APIs/torch_npu`, npu_rms_norm and npu_rotary_mul.

Dimensions: N samples, T tokens, H heads, D features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_aigc_kernels.dispatch import KERNEL_DTYPES, has_npu_ops, why_no_kernel
from lightning_aigc_kernels.qk_norm_rope.norm_rope import NormRope

OPS = ("npu_rms_norm", "npu_rms_norm_backward", "npu_rotary_mul")
HEADS_END, FEATURES_END = 1000, 896


def serves(x_NTHD: Tensor, how: NormRope) -> bool:
    """Whether torch_npu's operators take this call, and no Triton kernel can be launched."""
    if x_NTHD.device.type != "npu" or x_NTHD.dtype not in KERNEL_DTYPES or not has_npu_ops(*OPS):
        return False
    samples, _, heads, features = x_NTHD.shape
    if x_NTHD.numel() == 0 or why_no_kernel("qk_norm_rope") is None:
        return False
    if how.cos is None:
        return how.norm
    one_table = how.cos.dim() == 2 or len(how.cos) == 1
    return one_table and samples * heads < HEADS_END and features < FEATURES_END


def forward(x_NTHD: Tensor, how: NormRope, out_NTHD: Tensor) -> Tensor:
    """rotate(rms_norm(x) * weight), computed in float32 and rounded once, written to `out`."""
    x = x_NTHD.float()
    if how.norm:
        x, _ = torch.ops.npu.npu_rms_norm(x, _weight(x, how), how.eps)
    return out_NTHD.copy_(_rotated(x, how, backwards=False))


def backward(
    dy_NTHD: Tensor, x_NTHD: Tensor, how: NormRope, dx_NTHD: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, written to `dx`, and if needed that of the weight.

    Args: x is not read without norm.
    """
    g = _rotated(dy_NTHD.float(), how, backwards=True)
    if not how.norm:
        return dx_NTHD.copy_(g), None
    x = x_NTHD.float()
    weight_D = _weight(x, how)
    _, rstd_NTH1 = torch.ops.npu.npu_rms_norm(x, weight_D, how.eps)
    dx, dweight_D = torch.ops.npu.npu_rms_norm_backward(g, x, weight_D, rstd_NTH1)
    return dx_NTHD.copy_(dx), dweight_D if need_weight else None


def _weight(x_NTHD: Tensor, how: NormRope) -> Tensor:
    return x_NTHD.new_ones(x_NTHD.shape[-1]) if how.weight is None else how.weight.float()


def _rotated(x_NTHD: Tensor, how: NormRope, backwards: bool) -> Tensor:
    """The rotation of x; the gradient of a rotation is the rotation by the opposite angles."""
    if how.cos is None or how.sin is None:
        return x_NTHD
    sin = -how.sin if backwards else how.sin
    tables = (table.float().reshape(1, x_NTHD.shape[1], 1, -1).repeat_interleave(2, -1) for table in (how.cos, sin))
    rotated: Tensor = torch.ops.npu.npu_rotary_mul(x_NTHD.contiguous(), *tables, "interleave")
    return rotated
