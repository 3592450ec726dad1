"""LayerNorm and a gated feed-forward as one op that keeps its input, or its input and first projection.

Native autograd keeps the normalised input, the projection, the activated gate and what LoRA or a trainable weight needs
of the product: 13 tensors of the input's size in Stable Diffusion. The products are the device's own; gate and
activation are `geglu`'s.

Dimensions: T tokens, C features, D inner features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels import geglu
from lightning_aigc_kernels.calling import (
    backward_dtype,
    compute_dtype,
    direct,
    direct_backward,
    no_second_derivative,
    refuse_functorch,
    without_autocast,
    without_values,
)
from lightning_aigc_kernels.linear_with_lora import (
    Projection,
    add_input_gradient,
    parameter_gradients,
    project,
)
from lightning_aigc_kernels.normalization import Norm, normalize, normalize_backward

__all__ = ["feed_forward"]

aten = torch.ops.aten


def feed_forward(
    x: Tensor,
    norm: Norm,
    first: Projection,
    second: Projection,
    activation: geglu.Activation = "gelu",
    *,
    keep_projection: bool = False,
    grad_dtype: torch.dtype | None = None,
    skip_product: bool = False,
) -> Tensor:
    """second(geglu(first(norm(x)))), without the residual.

    Args: x [..., C]; first gives [2 D] features (values, then gates), second takes D. `keep_projection` keeps the
        projection [T, 2 D] for backward instead of computing it again. `grad_dtype` runs backward's products in that
        dtype, for a loss that is scaled to fit it. `skip_product` computes nothing and returns numbers without
        meaning, for a forward pass that is repeated for what backward needs of it alone; nothing but x is kept then.
    Returns: [..., C'], in autocast's dtype where that is on, else x's.
    Raises: RuntimeError under torch.func.
    """
    refuse_functorch("feed_forward")
    dtype = compute_dtype(x)
    with without_autocast(x):
        y: Tensor = _call(
            x, norm.weight, norm.bias, *first.tensors, *second.tensors,
            norm.on, norm.eps, [first.scale, second.scale], activation,
            keep_projection and not skip_product, dtype, grad_dtype, skip_product,
        )[0]  # fmt: skip
    return y


@torch.library.custom_op("lightning_aigc::feed_forward", mutates_args=())
def _op(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight1: Tensor,
    bias1: Tensor | None,
    down1: Tensor | None,
    up1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    down2: Tensor | None,
    up2: Tensor | None,
    normed: bool,
    eps: float,
    scales: list[float],
    activation: str,
    keep_projection: bool,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    skip_product: bool,
) -> tuple[Tensor, Tensor]:
    if skip_product:
        return without_values(x, (*x.shape[:-1], weight2.shape[0]), dtype), x.new_empty(0, dtype=dtype)
    x_TC = x.reshape(-1, x.shape[-1])
    first = Projection(weight1, bias1, down1, up1, scales[0]).to(dtype)
    second = Projection(weight2, bias2, down2, up2, scales[1]).to(dtype)
    normalized_TC = normalize(x_TC, Norm(norm_weight, norm_bias, eps, normed), dtype).value
    projected_T2D = project(normalized_TC, first)
    y_TC = project(geglu.forward(projected_T2D, activation), second)
    kept = projected_T2D if keep_projection else projected_T2D.new_empty(0)
    # What an autograd.Function returns as a view may not be changed in place; nobody else has this memory.
    return aten._unsafe_view(y_TC, (*x.shape[:-1], weight2.shape[0])), kept


@_op.register_fake
def _(  # type: ignore[no-untyped-def]
    x, norm_weight, norm_bias, weight1, bias1, down1, up1, weight2, bias2, down2, up2,
    normed, eps, scales, activation, keep_projection, dtype, grad_dtype, skip_product
):  # fmt: skip
    shape = (*x.shape[:-1], weight2.shape[0])
    y = without_values(x, shape, dtype) if skip_product else x.new_empty(shape, dtype=dtype)
    tokens = x.numel() // x.shape[-1] if keep_projection else 0
    return y, x.new_empty((tokens, weight1.shape[0]) if keep_projection else (0,), dtype=dtype)


@torch.library.custom_op("lightning_aigc::feed_forward_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor,
    projected: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight1: Tensor,
    bias1: Tensor | None,
    down1: Tensor | None,
    up1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    down2: Tensor | None,
    up2: Tensor | None,
    needs: list[bool],
    normed: bool,
    eps: float,
    scales: list[float],
    activation: str,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
) -> list[Tensor]:
    """dx, then the gradients of the ten parameters that are in `needs`."""
    grad_dtype = backward_dtype(grad_dtype, dtype)
    x_TC = x.reshape(-1, x.shape[-1])
    first = Projection(weight1, bias1, down1, up1, scales[0])
    second = Projection(weight2, bias2, down2, up2, scales[1]).to(grad_dtype)
    norm = Norm(norm_weight, norm_bias, eps, normed)
    need_first, need_second = tuple(needs[2:6]), tuple(needs[6:10])

    normalized = normalize(x_TC, norm, dtype)
    projected_T2D = projected if projected.numel() else project(normalized.value, first.to(dtype))
    normalized_TC, first = normalized.value.to(grad_dtype), first.to(grad_dtype)
    dy_TC = dy.reshape(-1, dy.shape[-1]).to(grad_dtype)
    dproduct_TD = add_input_gradient(None, dy_TC, second)
    dprojected_T2D, product_TD = geglu.backward(dproduct_TD, projected_T2D.to(grad_dtype), activation, any(need_second))
    del projected_T2D, dproduct_TD
    dsecond: tuple[Tensor | None, ...] = (None,) * 4
    if product_TD is not None:
        dsecond = parameter_gradients(dy_TC, product_TD, second, need_second)  # type: ignore[arg-type]
    dfirst = parameter_gradients(dprojected_T2D, normalized_TC, first, need_first)  # type: ignore[arg-type]
    dnormalized_TC = add_input_gradient(None, dprojected_T2D, first)
    dx_TC, dnorm_weight, dnorm_bias = normalize_backward(dnormalized_TC, x_TC, norm, normalized, needs[0], needs[1])
    parameters = (norm_weight, norm_bias, weight1, bias1, down1, up1, weight2, bias2, down2, up2)
    grads = (dnorm_weight, dnorm_bias, *dfirst, *dsecond)
    return [
        dx_TC.view(x.shape),
        *(g.to(p.dtype) for g, p in zip(grads, parameters, strict=True) if g is not None and p is not None),
    ]


@_backward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    dy, x, projected, norm_weight, norm_bias, weight1, bias1, down1, up1, weight2, bias2, down2, up2, needs,
    *options
):  # fmt: skip
    parameters = (norm_weight, norm_bias, weight1, bias1, down1, up1, weight2, bias2, down2, up2)
    given = (p for p, need in zip(parameters, needs, strict=True) if need)
    return [x.new_empty(x.shape), *(p.new_empty(p.shape) for p in given)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, (normed, eps, scales, activation, _, dtype, grad_dtype, _) = inputs[:11], inputs[11:]
    ctx.options = normed, eps, scales, activation, dtype, grad_dtype
    ctx.save_for_backward(output[1], *tensors)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dy: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 19
    projected, x, *parameters = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[1:11])
    dx, *grads = _call_backward(dy, x, projected, *parameters, needs, *ctx.options)
    given = iter(grads)
    return dx, *(next(given) if need else None for need in needs), *(None,) * 8


_backward_op.register_autograd(no_second_derivative("feed_forward"))
_op.register_autograd(_autograd, setup_context=_setup_context)
_call = direct(_op, _setup_context, _autograd)
_call_backward = direct_backward(_backward_op)
