"""SwiGLU of two tensors, silu(gate) * up, as one op that saves gate and up and nothing else.

Native autograd saves silu(gate) as well. Gate and up may be views, such as halves of one wider projection in FLUX.2's
Flux2SwiGLU and parallel single block, or two projections as in Z-Image; they are saved as the views that they are.
`swiglu` is the op for one projection of values, then gates. The reference runs on every device, Triton on cuda and npu;
on npu torch_npu's `npu_swiglu` computes the forward of two halves that fill a contiguous projection, gate first, and
without Triton the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import kernel_for, refuse_functorch, why_no_kernel, without_autocast
from lightning_aigc_kernels.silu_mul import npu_kernel, reference


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two tensors of one shape and dtype, of any strides; without a copy if rows are contiguous.

    Raises: ValueError for shapes or dtypes that differ; RuntimeError under torch.func.
    """
    refuse_functorch("silu_mul")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        got = f"{tuple(gate.shape)} in {gate.dtype} and {tuple(up.shape)} in {up.dtype}"
        raise ValueError(f"gate and up must have one shape and dtype, got {got}")
    with without_autocast(gate):
        product: Tensor = _call(gate, up)
    return product


@torch.library.custom_op("lightning_aigc::silu_mul", mutates_args=())
def _op(gate: Tensor, up: Tensor) -> Tensor:
    projection = npu_kernel.projection_for(gate, up)
    if projection is not None:
        return npu_kernel.forward(projection)
    kernel = kernel_for("silu_mul", gate)
    product: Tensor = (reference if kernel is None else kernel).forward(gate, up)
    return product


@_op.register_fake
def _(gate, up):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape)


@torch.library.custom_op("lightning_aigc::silu_mul_backward", mutates_args=())
def _backward_op(dproduct: Tensor, gate: Tensor, up: Tensor | None, needs: list[bool]) -> list[Tensor]:
    """The needed gradients of gate and up; `up` is None if only its own is."""
    projection = None if up is None or why_no_kernel("silu_mul") is None else npu_kernel.projection_for(gate, up)
    if projection is not None:
        gradients = npu_kernel.backward(dproduct, projection, *needs)
    else:
        kernel = kernel_for("silu_mul", gate)
        gradients = (reference if kernel is None else kernel).backward(dproduct, gate, up, *needs)
    return [gradient for gradient in gradients if gradient is not None]


@_backward_op.register_fake
def _(dproduct, gate, up, needs):  # type: ignore[no-untyped-def]
    return [gate.new_empty(gate.shape) for need in needs if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up = inputs
    ctx.save_for_backward(gate, up if ctx.needs_input_grad[0] else None)


def _autograd(ctx: Any, dproduct: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:2])
    gradients = iter(_call_backward(dproduct, *ctx.saved_tensors, needs))
    return tuple(next(gradients) if need else None for need in needs)


_call, _call_backward = register_autograd(_op, _backward_op, _setup_context, _autograd)
