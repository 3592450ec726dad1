"""RMSNorm per head and rotary position embedding of a query or key as one op that saves only its input.

Native autograd saves the normalised, the weighted and the rotated tensor and their float32 copies. The rotation is in
real numbers, also where diffusers multiplies complex ones, which not every device knows. The reference runs on every
device, Triton on cuda and npu.

On npu the Triton kernel makes one pass over the tensor; torch_npu's npu_rms_norm and npu_rotary_mul make one each, and
compute where no Triton kernel can be launched (`npu_kernel.py`).

Dimensions: N samples, T tokens, H heads, D features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import kernel_for, refuse_functorch, warn_once, without_autocast
from lightning_aigc_kernels.qk_norm_rope import npu_kernel, reference
from lightning_aigc_kernels.qk_norm_rope.norm_rope import NormRope, check


def qk_norm_rope(
    x: Tensor,
    weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm: bool = True,
) -> Tensor:
    """rotate(rms_norm(x) * weight) of a query or key, computed in float32 and rounded once.

    Args: x [N, T, H, D], such as a view of a projection [N, T, H * D]; weight [D]; `norm=False` leaves out the norm;
        cos and sin [T, D/2] or [N, T, D/2], None for no rotation, turn the interleaved pairs (x0, x1) into
        (x0 cos - x1 sin, x1 cos + x0 sin). See `rotary_from_repeated` and `rotary_from_complex` for diffusers' forms.
    Returns: a contiguous [N, T, H, D] in x's dtype, under autocast too.
    Raises: ValueError if a shape does not match, or cos or sin want a gradient; RuntimeError under torch.func.
    """
    refuse_functorch("qk_norm_rope")
    if x.dim() != 4:
        raise ValueError(f"qk_norm_rope wants x [N, T, H, D], got {tuple(x.shape)}")
    check("qk_norm_rope", tuple(x.shape), NormRope(weight, cos, sin, eps, norm))
    with without_autocast(x):
        y: Tensor = _call(x, weight, cos, sin, eps, norm)
    return y


def forward(x_NTHD: Tensor, how: NormRope, out_NTHD: Tensor) -> Tensor:
    """The result, written to `out` by the device's fastest implementation, without autograd, for larger ops.

    Args: out may have another dtype than x and any strides.
    """
    written: Tensor = _implementation(x_NTHD, how).forward(x_NTHD, how, out_NTHD)
    return written


def backward(dy_NTHD: Tensor, x_NTHD: Tensor, how: NormRope, need_weight: bool = False) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, contiguous and in its dtype, and if needed that of the weight, without autograd.

    Args: of x only the dtype is read without norm.
    """
    dx_NTHD = x_NTHD.new_empty(dy_NTHD.shape)
    made: tuple[Tensor, Tensor | None] = _implementation(x_NTHD, how).backward(
        dy_NTHD, x_NTHD, how, dx_NTHD, need_weight
    )
    return made


def _implementation(x_NTHD: Tensor, how: NormRope) -> Any:
    """The Triton kernels where they take x, else torch_npu's, else the reference, with a warning once on a device."""
    if npu_kernel.serves(x_NTHD, how):
        return npu_kernel
    kernel = kernel_for("qk_norm_rope", x_NTHD)
    reason = None if kernel is None else kernel.why_not(x_NTHD, how)
    if reason is not None:
        warn_once("qk_norm_rope", x_NTHD.device.type, f"its Triton kernel cannot: {reason}")
    return reference if kernel is None or reason is not None else kernel


@torch.library.custom_op("lightning_aigc::qk_norm_rope", mutates_args=())
def _op(x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, norm: bool) -> Tensor:
    return forward(x, NormRope(weight, cos, sin, eps, norm), x.new_empty(x.shape))


@_op.register_fake
def _(x, weight, cos, sin, eps, norm):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@torch.library.custom_op("lightning_aigc::qk_norm_rope_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    norm: bool,
    need_weight: bool,
) -> list[Tensor]:
    """dx, and with `need_weight` the weight's gradient; x is None without norm."""
    dx, dweight = backward(dy, dy if x is None else x, NormRope(weight, cos, sin, eps, norm), need_weight)
    return [dx] if dweight is None or weight is None else [dx, dweight.to(weight.dtype)]


@_backward_op.register_fake
def _(dy, x, weight, cos, sin, eps, norm, need_weight):  # type: ignore[no-untyped-def]
    return [dy.new_empty(dy.shape), *([weight.new_empty(weight.shape)] if need_weight else ())]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(x if ctx.options[1] else None, weight, cos, sin)  # a rotation alone does not read x


def _autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    need_x, need_weight = ctx.needs_input_grad[:2]
    dx, *dweight = _call_backward(dy, *ctx.saved_tensors, *ctx.options, need_weight)
    return dx if need_x else None, dweight[0] if dweight else None, None, None, None, None


_call, _call_backward = register_autograd(_op, _backward_op, _setup_context, _autograd)
