"""LayerNorm, the q, k, v projections with their LoRA branches, attention and the output projection as one op.

Native autograd saves the normalised input, q, k, v, the attention's output and every LoRA's inner tensor. This op saves
its input and, as `keeps` says, the attention's output, the value, the key and the query; it recomputes the rest.
Attention to a short context is cheap, so its output need not be saved either. The LoRA gradients are exact.

Dimensions: N samples, H heads, T tokens of x, S of the context, C features; a flat token dimension is written R.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import check_density, compute_dtype, refuse_functorch, without_autocast
from lightning_aigc_kernels.linear_with_lora import LoRAProjection, linear_with_lora
from lightning_aigc_kernels.lora_attention import passes
from lightning_aigc_kernels.normalization import NormParameters, layer_norm
from lightning_aigc_kernels.packing import empty_wanted, pack_layers, spread, unpack, unpack_layers, wanted

KEEPS = {"output": passes.OUTPUT, "value": passes.VALUE, "key": passes.KEY, "query": passes.QUERY}
"""Tensors that can be saved for backward, each with its bit in the op's `keeps`."""
KnownAttention = tuple[Tensor, Tensor, Tensor]
"""An attention's output [N, T, C] and its two softmax tensors, from an earlier forward pass of the same inputs."""


def lora_attention(
    x: Tensor,
    context: Tensor | None,
    norm: NormParameters,
    query: LoRAProjection,
    key: LoRAProjection,
    value: LoRAProjection,
    out: LoRAProjection,
    heads: int,
    *,
    keeps: int | Collection[str] = 1,
    grad_dtype: torch.dtype | None = None,
    gradient_density: float = 1.0,
    known: KnownAttention | None = None,
) -> tuple[Tensor, KnownAttention | None]:
    """out(attention(q, k, v)) with q of norm(x), and k and v of the context or norm(x), without the residual.

    Args: x [N, T, C]; context [N, S, C'] or None for self-attention. `keeps` names what is saved for
        backward instead of recomputed, of "output", "value", "key" and "query"; a number, 0 to 3, is how many of the
        first three. `grad_dtype` is the dtype of
        backward's products, for a scaled loss. `gradient_density` below 1 drops the smallest entries of dq, dk and dv
        (see `sparse_attention_backward`). `known`, the attention's output of an earlier pass, skips the attention, and
        only it is saved.
    Returns: y [N, T, C''], in autocast's dtype if it is enabled, else x's, and the attention's output for `known`, None
        if it is not saved.
    Raises: ValueError if shapes do not match, the heads do not divide the features or `keeps` is out of range;
        RuntimeError under torch.func.
    """
    refuse_functorch("lora_attention")
    _check(x, context, (query, key, value), heads, keeps, gradient_density)
    dtype = compute_dtype(x)
    bits = sum(KEEPS[name] for name in (tuple(KEEPS)[:keeps] if isinstance(keeps, int) else set(keeps)))
    parameters, given, scales = pack_layers(norm, (query, key, value, out))
    with without_autocast(x):
        y, *made = _call(
            x, context, parameters, given, list(known or ()), norm.on, norm.eps, heads, scales, bits, dtype,
            grad_dtype, gradient_density,
        )  # fmt: skip
    return y, known or ((made[0].detach(), made[1].detach(), made[2].detach()) if bits & passes.OUTPUT else None)


def _check(
    x: Tensor, context: Tensor | None, inward: tuple[LoRAProjection, ...], heads: int, keeps: Any, density: float
) -> None:
    check_density(density, "gradient_density")
    if x.dim() != 3 or (context is not None and (context.dim() != 3 or context.shape[0] != x.shape[0])):
        got = f"{tuple(x.shape)}" if context is None else f"{tuple(x.shape)} and {tuple(context.shape)}"
        raise ValueError(f"lora_attention wants x [N, T, C] and context [N, S, C'] or None, got {got}")
    widths = [layer.weight.shape[0] for layer in inward]
    if widths[0] % heads or widths[2] % heads:
        raise ValueError(f"heads must divide the query's and the value's features: got {heads} heads for {widths}")
    if widths[0] != widths[1]:
        raise ValueError(f"query and key must have equally many features, got {widths[0]} and {widths[1]}")
    if isinstance(keeps, int):
        if keeps not in range(4):
            raise ValueError(f"keeps must be 0, 1, 2 or 3 (output, value, key), got {keeps}")
    elif not set(keeps) <= KEEPS.keys():
        raise ValueError(f"keeps must name some of {', '.join(KEEPS)}, got {keeps!r}")


@torch.library.custom_op("lightning_aigc::lora_attention", mutates_args=())
def _op(
    x: Tensor,
    context: Tensor | None,
    parameters: list[Tensor],
    given: list[bool],
    known: list[Tensor],
    normed: bool,
    eps: float,
    heads: int,
    scales: list[float],
    keeps: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    density: float,
) -> list[Tensor]:
    """y; without `known` also the saved ones of the attention's output with its softmax, v, k and q."""
    norm, (*inward, out) = unpack_layers(parameters, given, normed, eps, scales)
    block = passes.Block(norm, inward, out, heads, dtype)
    return passes.forward(x, context, block, keeps, known[0] if known else None)


_op.register_fake(_op._init_fn)


@torch.library.custom_op("lightning_aigc::lora_attention_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor,
    context: Tensor | None,
    parameters: list[Tensor],
    given: list[bool],
    kept: list[Tensor],
    keeps: int,
    needs: list[bool],
    normed: bool,
    eps: float,
    heads: int,
    scales: list[float],
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    density: float,
) -> list[Tensor]:
    """The gradients of x, context and the parameters that `needs` selects."""
    norm, (*inward, out) = unpack_layers(parameters, given, normed, eps, scales)
    block = passes.Block(norm, inward, out, heads, dtype)
    all_needs = needs[:2] + unpack(needs[2:], given, absent=False)
    gradients = passes.backward(dy, x, context, block, kept, keeps, all_needs, grad_dtype, density)
    return wanted(gradients, (x, context, *unpack(parameters, given)), all_needs)


@_backward_op.register_fake
def _(dy, x, context, parameters, given, kept, keeps, needs, *options):  # type: ignore[no-untyped-def]
    return empty_wanted((x, context, *parameters), needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, context, parameters, ctx.given, known, normed, eps, heads, scales, keeps, dtype, grad_dtype, density = inputs
    ctx.options = normed, eps, heads, scales, dtype, grad_dtype, density
    ctx.known, ctx.keeps = len(known), passes.OUTPUT if known else keeps
    ctx.save_for_backward(x, context, *parameters, *(known or output[1:]))
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x_and_context, of_parameters = ctx.needs_input_grad[:2], ctx.needs_input_grad[2]
    nothing = [None] * ctx.known, *(None,) * 8
    if grads[0] is None:
        return None, None, [None] * len(of_parameters), None, *nothing
    x, context, *saved = ctx.saved_tensors  # read once: under checkpointing a second read is an error
    parameters, kept = saved[: len(of_parameters)], saved[len(of_parameters) :]
    needs = [*x_and_context, *of_parameters]
    gradients = iter(_call_backward(grads[0], x, context, parameters, ctx.given, kept, ctx.keeps, needs, *ctx.options))
    return *spread(gradients, x_and_context), spread(gradients, of_parameters), None, *nothing


_call, _call_backward = register_autograd(_op, _backward_op, _setup_context, _autograd)


def lora_attention_reference(
    x: Tensor,
    context: Tensor | None,
    norm: NormParameters,
    query: LoRAProjection,
    key: LoRAProjection,
    value: LoRAProjection,
    out: LoRAProjection,
    heads: int,
) -> Tensor:
    """Compute `lora_attention` in plain torch, with torch's autograd."""
    normalized = layer_norm(x, norm)
    source = normalized if context is None else context
    q, k, v = linear_with_lora(normalized, query), linear_with_lora(source, key), linear_with_lora(source, value)
    o = F.scaled_dot_product_attention(_heads_first(q, heads), _heads_first(k, heads), _heads_first(v, heads))
    return linear_with_lora(o.transpose(1, 2).flatten(2), out)


def _heads_first(tokens: Tensor, heads: int) -> Tensor:
    return tokens.view(*tokens.shape[:2], heads, tokens.shape[2] // heads).transpose(1, 2)
