"""GEGLU and SwiGLU as one op that saves only the projection.

Native autograd saves the projection, the activated gate and, for a trainable next layer, the product. The reference
runs on every device, Triton on cuda and npu.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_aigc_kernels.custom_op import direct, direct_backward, no_second_derivative
from lightning_aigc_kernels.dispatch import kernel_for, refuse_functorch, without_autocast
from lightning_aigc_kernels.geglu import reference
from lightning_aigc_kernels.matmul import in_shape_of, rows_of

Activation = Literal["gelu", "silu"]
NAMES = {"gelu": "geglu", "silu": "swiglu"}


def geglu(projected: Tensor) -> Tensor:
    """value * gelu(gate), with exact GELU, of a projection [..., 2 D] of values, then gates, as diffusers' GEGLU.

    Raises: ValueError for an odd last dimension; RuntimeError under torch.func.
    """
    return _gated(projected, "gelu")


def swiglu(projected: Tensor) -> Tensor:
    """value * silu(gate) of a projection [..., 2 D] of values, then gates, as diffusers' SwiGLU.

    Raises: ValueError for an odd last dimension; RuntimeError under torch.func.
    """
    return _gated(projected, "silu")


def _gated(projected: Tensor, activation: Activation) -> Tensor:
    refuse_functorch(NAMES[activation])
    if projected.dim() < 1 or projected.shape[-1] % 2:
        raise ValueError(f"the projection must be [..., 2 D], values then gates, got {tuple(projected.shape)}")
    with without_autocast(projected):
        product: Tensor = _call(projected, activation)
    return product


def forward(projected_R2D: Tensor, activation: str) -> Tensor:
    """The product [R, D] by the device's fastest implementation, without autograd, for larger ops."""
    kernel = kernel_for("geglu", projected_R2D)
    implementation = reference if kernel is None else kernel
    product_RD: Tensor = implementation.forward(projected_R2D.contiguous(), activation)
    return product_RD


def backward(
    dproduct_RD: Tensor, projected_R2D: Tensor, activation: str, need_product: bool
) -> tuple[Tensor, Tensor | None]:
    """The projection's gradient and, if needed, the recomputed product, without autograd."""
    kernel = kernel_for("geglu", projected_R2D)
    implementation = reference if kernel is None else kernel
    dprojected_R2D, product_RD = implementation.backward(
        dproduct_RD.contiguous(), projected_R2D.contiguous(), activation, need_product
    )
    return dprojected_R2D, product_RD


@torch.library.custom_op("lightning_aigc::geglu", mutates_args=())
def _op(projected: Tensor, activation: str) -> Tensor:
    return in_shape_of(projected, forward(rows_of(projected), activation))


@_op.register_fake
def _(projected, activation):  # type: ignore[no-untyped-def]
    return projected.new_empty((*projected.shape[:-1], projected.shape[-1] // 2))


@torch.library.custom_op("lightning_aigc::geglu_backward", mutates_args=())
def _backward_op(dproduct: Tensor, projected: Tensor, activation: str) -> Tensor:
    return backward(rows_of(dproduct), rows_of(projected), activation, False)[0].view(projected.shape)


@_backward_op.register_fake
def _(dproduct, projected, activation):  # type: ignore[no-untyped-def]
    return projected.new_empty(projected.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    projected, ctx.activation = inputs
    ctx.save_for_backward(projected)


def _autograd(ctx: Any, dproduct: Tensor) -> tuple[Tensor, None]:
    (projected,) = ctx.saved_tensors
    return _call_backward(dproduct, projected, ctx.activation), None


def _keep_name(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.name = NAMES[inputs[2]]


def _refuse_second_derivative(ctx: Any, *grads: object) -> None:
    no_second_derivative(ctx.name)(ctx, *grads)


_backward_op.register_autograd(_refuse_second_derivative, setup_context=_keep_name)
_op.register_autograd(_autograd, setup_context=_setup_context)
_call = direct(_op, _setup_context, _autograd)
_call_backward = direct_backward(_backward_op)
