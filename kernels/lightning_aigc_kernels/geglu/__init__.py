"""GEGLU and SwiGLU as one op that keeps the projection and nothing made of it.

Native autograd keeps the projection, the activated gate and, for a trainable layer behind it, the product. The
reference serves every device; Triton serves cuda and npu.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_aigc_kernels.calling import (
    direct,
    direct_backward,
    kernel_for,
    no_second_derivative,
    refuse_functorch,
    without_autocast,
)
from lightning_aigc_kernels.geglu import reference

__all__ = ["Activation", "geglu", "swiglu"]

Activation = Literal["gelu", "silu"]
NAMES = {"gelu": "geglu", "silu": "swiglu"}
aten = torch.ops.aten


def geglu(projected: Tensor) -> Tensor:
    """value * gelu(gate) of a projection [..., 2 D] that holds values, then gates, as diffusers' GEGLU; exact GELU.

    Raises: ValueError for an odd last dimension; RuntimeError under torch.func.
    """
    return _gated(projected, "gelu")


def swiglu(projected: Tensor) -> Tensor:
    """value * silu(gate) of a projection [..., 2 D] that holds values, then gates, as diffusers' SwiGLU.

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
    """The product [R, D] by the best that the device has; for other ops to build on, no autograd."""
    kernel = kernel_for("geglu", projected_R2D)
    implementation = reference if kernel is None else kernel
    product_RD: Tensor = implementation.forward(projected_R2D.contiguous(), activation)
    return product_RD


def backward(
    dproduct_RD: Tensor, projected_R2D: Tensor, activation: str, need_product: bool
) -> tuple[Tensor, Tensor | None]:
    """The projection's gradient and, if wanted, the product again; no autograd."""
    kernel = kernel_for("geglu", projected_R2D)
    implementation = reference if kernel is None else kernel
    dprojected_R2D, product_RD = implementation.backward(
        dproduct_RD.contiguous(), projected_R2D.contiguous(), activation, need_product
    )
    return dprojected_R2D, product_RD


@torch.library.custom_op("lightning_aigc::geglu", mutates_args=())
def _op(projected: Tensor, activation: str) -> Tensor:
    product_RD = forward(_rows(projected), activation)
    # What an autograd.Function returns as a view may not be changed in place; nobody else has this memory.
    product: Tensor = aten._unsafe_view(product_RD, (*projected.shape[:-1], projected.shape[-1] // 2))
    return product


@_op.register_fake
def _(projected, activation):  # type: ignore[no-untyped-def]
    return projected.new_empty((*projected.shape[:-1], projected.shape[-1] // 2))


@torch.library.custom_op("lightning_aigc::geglu_backward", mutates_args=())
def _backward_op(dproduct: Tensor, projected: Tensor, activation: str) -> Tensor:
    return backward(_rows(dproduct), _rows(projected), activation, False)[0].view(projected.shape)


def _rows(features: Tensor) -> Tensor:
    return features.reshape(math.prod(features.shape[:-1]), features.shape[-1])  # -1 would not do for an empty one


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
