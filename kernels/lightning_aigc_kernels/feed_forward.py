"""LayerNorm and a gated feed-forward as one op that saves its input, or its input and first projection.

Native autograd saves the normalised input, the projection, the activated gate and the product for LoRA or a trainable
weight: 13 tensors of the input's size in Stable Diffusion. Matrix products are torch's; gate and activation are
`geglu`'s.

Dimensions: T tokens, C features, D inner features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import (
    backward_dtype,
    cast,
    compute_dtype,
    refuse_functorch,
    without_autocast,
    without_values,
)
from lightning_aigc_kernels.geglu import op as geglu
from lightning_aigc_kernels.geglu import reference as gates
from lightning_aigc_kernels.linear_with_lora import (
    LoRAProjection,
    Needs,
    add_input_gradient,
    inner,
    inner_gradient,
    linear_with_lora,
    parameter_gradients,
    project,
)
from lightning_aigc_kernels.matmul import in_shape_of, rows_of
from lightning_aigc_kernels.normalization import NormParameters, layer_norm, normalize, normalize_backward
from lightning_aigc_kernels.packing import empty_wanted, pack_layers, spread, unpack, unpack_layers, wanted


def feed_forward(
    x: Tensor,
    norm: NormParameters,
    first: LoRAProjection,
    second: LoRAProjection,
    activation: geglu.Activation = "gelu",
    *,
    keep_projection: bool = False,
    grad_dtype: torch.dtype | None = None,
    skip_product: bool = False,
) -> Tensor:
    """second(geglu(first(norm(x)))) without the residual.

    Args: x [..., C]; first outputs 2 D features (values, then gates), second takes D. `keep_projection` saves the
        projection [T, 2 D] for backward instead of recomputing it. `grad_dtype` is the dtype of backward's products,
        for a scaled loss. `skip_product` computes nothing and returns meaningless values, for a recomputed forward
        whose output is not read; only x is saved then.
    Returns: [..., C'], in autocast's dtype if it is enabled, else x's.
    Raises: RuntimeError under torch.func.
    """
    refuse_functorch("feed_forward")
    dtype = compute_dtype(x)
    parameters, given, scales = pack_layers(norm, (first, second))
    with without_autocast(x):
        y: Tensor = _call(
            x, parameters, given, norm.on, norm.eps, scales, activation,
            keep_projection and not skip_product, dtype, grad_dtype, skip_product,
        )[0]  # fmt: skip
    return y


@torch.library.custom_op("lightning_aigc::feed_forward", mutates_args=())
def _op(
    x: Tensor,
    parameters: list[Tensor],
    given: list[bool],
    normed: bool,
    eps: float,
    scales: list[float],
    activation: str,
    keep_projection: bool,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    skip_product: bool,
) -> tuple[Tensor, Tensor]:
    """y and the projection, which is empty unless saved."""
    norm, (first, second) = unpack_layers(parameters, given, normed, eps, scales)
    if skip_product:
        return without_values(x, (*x.shape[:-1], second.weight.shape[0]), dtype), x.new_empty(0, dtype=dtype)
    normalized_TC = normalize(rows_of(x), norm, dtype).value
    projected_T2D = project(normalized_TC, first.to(dtype))
    y_TC = project(geglu.forward(projected_T2D, activation), second.to(dtype))
    return in_shape_of(x, y_TC), projected_T2D if keep_projection else projected_T2D.new_empty(0)


@_op.register_fake
def _(  # type: ignore[no-untyped-def]
    x, parameters, given, normed, eps, scales, activation, keep_projection, dtype, grad_dtype, skip_product
):  # fmt: skip
    _, (first, second) = unpack_layers(parameters, given, normed, eps, scales)
    shape = (*x.shape[:-1], second.weight.shape[0])
    y = without_values(x, shape, dtype) if skip_product else x.new_empty(shape, dtype=dtype)
    tokens = x.numel() // x.shape[-1] if keep_projection else 0
    return y, x.new_empty((tokens, first.weight.shape[0]) if keep_projection else (0,), dtype=dtype)


@torch.library.custom_op("lightning_aigc::feed_forward_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor,
    projected: Tensor,
    parameters: list[Tensor],
    given: list[bool],
    needs: list[bool],
    normed: bool,
    eps: float,
    scales: list[float],
    activation: str,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
) -> list[Tensor]:
    """dx, then the gradients of the parameters that `needs` selects."""
    grad_dtype = backward_dtype(grad_dtype, dtype)
    x_TC = rows_of(x)
    norm, (first, second) = unpack_layers(parameters, given, normed, eps, scales)
    second = second.to(grad_dtype)
    need_weight, need_bias, *need_layers = unpack(needs, given, absent=False)
    need_first, need_second = Needs(*need_layers[:4]), Needs(*need_layers[4:])

    normalized = normalize(x_TC, norm, dtype)
    # LoRA's inner tensors and their gradients are made once for both of their uses.
    inner_TR = None
    if not projected.numel():
        inner_TR = inner(normalized.value, first.to(dtype))
        projected = project(normalized.value, first.to(dtype), inner_TR)
    projected_T2D = projected
    inner_TR = inner_TR if dtype == grad_dtype else None
    normalized_TC, first = cast(normalized.value, grad_dtype), first.to(grad_dtype)
    dy_TC = cast(rows_of(dy), grad_dtype)
    dinner_TR = inner_gradient(dy_TC, second)
    dproduct_TD = add_input_gradient(None, dy_TC, second, dinner_TR)
    dprojected_T2D, product_TD = geglu.backward(
        dproduct_TD, cast(projected_T2D, grad_dtype), activation, any(need_second)
    )
    del projected, projected_T2D, dproduct_TD
    dsecond: tuple[Tensor | None, ...] = (None,) * 4
    if product_TD is not None:
        dsecond = parameter_gradients(dy_TC, product_TD, second, need_second, dinner_TR=dinner_TR)
    dinner_TR = inner_gradient(dprojected_T2D, first)
    dfirst = parameter_gradients(dprojected_T2D, normalized_TC, first, need_first, inner_TR, dinner_TR)
    dnormalized_TC = add_input_gradient(None, dprojected_T2D, first, dinner_TR)
    dx_TC, dnorm_weight, dnorm_bias = normalize_backward(dnormalized_TC, x_TC, norm, normalized, need_weight, need_bias)
    gradients = (dnorm_weight, dnorm_bias, *dfirst, *dsecond)
    return [dx_TC.view(x.shape), *wanted(gradients, unpack(parameters, given), unpack(needs, given, absent=False))]


@_backward_op.register_fake
def _(dy, x, projected, parameters, given, needs, *options):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape), *empty_wanted(parameters, needs)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, parameters, ctx.given, normed, eps, scales, activation, _, dtype, grad_dtype, _ = inputs
    ctx.options = normed, eps, scales, activation, dtype, grad_dtype
    ctx.save_for_backward(x, output[1], *parameters)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dy: Tensor | None, _: object) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[1])
    if dy is None:
        return None, [None] * len(needs), *(None,) * 9
    x, projected, *parameters = ctx.saved_tensors
    dx, *gradients = _call_backward(dy, x, projected, parameters, ctx.given, needs, *ctx.options)
    return dx, spread(iter(gradients), needs), *(None,) * 9


_call, _call_backward = register_autograd(_op, _backward_op, _setup_context, _autograd)


def feed_forward_reference(
    x: Tensor,
    norm: NormParameters,
    first: LoRAProjection,
    second: LoRAProjection,
    activation: geglu.Activation = "gelu",
) -> Tensor:
    """Compute `feed_forward` in plain torch, with torch's autograd."""
    gated = gates.geglu if activation == "gelu" else gates.swiglu
    return linear_with_lora(gated(linear_with_lora(layer_norm(x, norm), first)), second)
