"""The residual behind a gated branch as one op: x + gate * y, or x + gate * RMSNorm(y).

Native autograd saves y and gate, and with a norm the normalised y too. Here y is saved only if the norm or the gate's
gradient reads it. The gradient of x is the incoming one itself. As behind the attention and the feed-forward of SD 3,
FLUX, FLUX.2 and Qwen-Image, and with the norm of Z-Image. Kernel and reference are those of modulated_norm, with the
gate in the place of 1 + scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import refuse_functorch, without_autocast
from lightning_aigc_kernels.modulated_norm.modulation import (
    Modulation,
    Needs,
    check_channels,
    check_tokens,
    row_of_each_sample,
)
from lightning_aigc_kernels.modulated_norm.op import backward, forward


def gated_residual(
    x: Tensor,
    gate: Tensor | None,
    y: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-5,
    rms: bool = False,
) -> Tensor:
    """x + gate * y, or with `rms` or a `norm_weight` x + gate * RMSNorm(y) * norm_weight, saving at most y.

    Args: x and y [N, T, C]; gate [N, C] or [N, 1, C], one row a sample, or one row for all, as it is: a tanh is the
        caller's; None for no gate; norm_weight [C].
    Returns: x's shape, in the dtype that x and y promote to; autocast changes nothing, as for torch's own sum.
    Raises: ValueError for a shape that does not match; RuntimeError under torch.func.
    """
    refuse_functorch("gated_residual")
    check_tokens("gated_residual", x)
    if x.shape != y.shape:
        raise ValueError(f"x and y must have one shape, got {tuple(x.shape)} and {tuple(y.shape)}")
    check_channels("norm_weight", norm_weight, y)
    gate = row_of_each_sample("gate", gate, y)
    norm = "rms" if rms or norm_weight is not None else "none"
    with without_autocast(x):
        out: Tensor = _call(x, gate, y, norm_weight, norm, eps, torch.promote_types(x.dtype, y.dtype))
    return out


@torch.library.custom_op("lightning_aigc::gated_residual", mutates_args=())
def _op(
    x: Tensor, gate: Tensor | None, y: Tensor, weight: Tensor | None, norm: str, eps: float, dtype: torch.dtype
) -> Tensor:
    return forward(y, Modulation(gate, None, weight, None, norm, eps, False), dtype, x)


@_op.register_fake
def _(x, gate, y, weight, norm, eps, dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("lightning_aigc::gated_residual_backward", mutates_args=())
def _backward_op(
    dout: Tensor,
    gate: Tensor | None,
    y: Tensor | None,
    weight: Tensor | None,
    norm: str,
    eps: float,
    dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor]:
    """The needed gradients of gate, y and weight; dy in `dtype`. `y` is None if none reads it."""
    need_gate, need_y, need_weight = needs
    modulation = Modulation(gate, None, weight, None, norm, eps, False)
    dy, dgate, _, dweight, _ = backward(dout, y, modulation, dtype, Needs(need_y, scale=need_gate, weight=need_weight))
    return [gradient for gradient in (dgate, dy, dweight) if gradient is not None]


@_backward_op.register_fake
def _(dout, gate, y, weight, norm, eps, dtype, needs):  # type: ignore[no-untyped-def]
    made = [gate.new_empty(gate.shape)] if needs[0] else []
    made += [dout.new_empty(dout.shape, dtype=dtype)] if needs[1] else []
    return made + ([weight.new_empty(weight.shape)] if needs[2] else [])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gate, y, weight, ctx.norm, ctx.eps, _ = inputs
    ctx.x_dtype, ctx.y_dtype = x.dtype, y.dtype
    _, need_gate, need_y, need_weight, *_ = ctx.needs_input_grad
    reads_y = need_gate or need_weight or (need_y and ctx.norm != "none")
    ctx.save_for_backward(gate, y if reads_y else None, weight)


def _autograd(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    need_x, *needs = ctx.needs_input_grad[:4]
    dx = dout.to(ctx.x_dtype) if need_x else None
    if not any(needs):
        return dx, *(None,) * 6
    gradients = iter(_call_backward(dout, *ctx.saved_tensors, ctx.norm, ctx.eps, ctx.y_dtype, needs))
    return dx, *(next(gradients) if need else None for need in needs), None, None, None


_call, _call_backward = register_autograd(_op, _backward_op, _setup_context, _autograd)
