"""LayerNorm, the q, k, v projections with their LoRA branches, attention and the output projection as one op.

Native autograd keeps the normalised input, q, k, v, the attention's output and every LoRA's inner tensor. This op keeps
its input and as many of the attention's output, the value and the key as the caller has room for, in this order; the
rest is computed again. Attention to a short context costs next to nothing, so its output need not be kept either.
The gradients of the LoRA's matrices are exact: nothing is approximated.

Dimensions: N samples, H heads, T tokens of x, S of the context, C features; a flat token dimension is written R.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.calling import (
    backward_dtype,
    check_density,
    compute_dtype,
    direct,
    direct_backward,
    no_second_derivative,
    refuse_functorch,
    without_autocast,
)
from lightning_aigc_kernels.keep_largest import keep_largest_per_head
from lightning_aigc_kernels.linear_with_lora import (
    Projection,
    add_input_gradient,
    parameter_gradients,
    project,
)
from lightning_aigc_kernels.lora_attention.core import attend, attend_backward
from lightning_aigc_kernels.normalization import Norm, Normalized, normalize, normalize_backward

__all__ = ["KnownAttention", "lora_attention"]

aten = torch.ops.aten

KnownAttention = tuple[Tensor, Tensor, Tensor]
"""An attention's output [N, T, C] and its two softmax tensors, from an earlier forward pass of the same inputs."""


def lora_attention(
    x: Tensor,
    context: Tensor | None,
    norm: Norm,
    query: Projection,
    key: Projection,
    value: Projection,
    out: Projection,
    heads: int,
    *,
    keeps: int = 1,
    grad_dtype: torch.dtype | None = None,
    gradient_density: float = 1.0,
    known: KnownAttention | None = None,
) -> tuple[Tensor, KnownAttention | None]:
    """out(attention(q, k, v)) of q from norm(x), k and v from the context or norm(x); without the residual.

    Args: x [N, T, C]; context [N, S, C'] or None for self-attention. `keeps`, 0 to 3, is how many of the attention's
        output, v and k, in this order, stay for backward instead of being computed again; `grad_dtype` runs backward's
        products in that dtype, for a loss that is scaled to fit it; `gradient_density` below 1 drops the smallest
        entries of dq, dk and dv (see `sparse_attention_backward`); `known` spares the attention itself when its output
        is at hand, and then that is all that is kept.
    Returns: y [N, T, C''], in autocast's dtype where that is on, else x's, and the attention's output for `known`, None
        where it is not kept.
    Raises: ValueError when shapes do not fit, the heads do not divide the features or `keeps` is no such number;
        RuntimeError under torch.func.
    """
    refuse_functorch("lora_attention")
    check_density(gradient_density, "gradient_density")
    if x.dim() != 3 or (context is not None and (context.dim() != 3 or context.shape[0] != x.shape[0])):
        got = f"{tuple(x.shape)}" if context is None else f"{tuple(x.shape)} and {tuple(context.shape)}"
        raise ValueError(f"lora_attention wants x [N, T, C] and context [N, S, C'] or None, got {got}")
    widths = [layer.weight.shape[0] for layer in (query, key, value)]
    if widths[0] % heads or widths[2] % heads:
        raise ValueError(f"heads must divide the query's and the value's features: got {heads} heads for {widths}")
    if widths[0] != widths[1]:
        raise ValueError(f"query and key must give as many features as one another, got {widths[0]} and {widths[1]}")
    if keeps not in range(4):
        raise ValueError(f"keeps must be 0, 1, 2 or 3 (output, value, key), got {keeps}")
    layers = (query, key, value, out)
    dtype = compute_dtype(x)
    with without_autocast(x):
        y, *made = _call(
            x, context, norm.weight, norm.bias, *(t for layer in layers for t in layer.tensors),
            *(known or (None,) * 3), norm.on, norm.eps, heads, [layer.scale for layer in layers], keeps, dtype,
            grad_dtype, gradient_density,
        )  # fmt: skip
    return y, known or ((made[0].detach(), made[1].detach(), made[2].detach()) if keeps else None)


@torch.library.custom_op("lightning_aigc::lora_attention", mutates_args=())
def _op(
    x: Tensor,
    context: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight_q: Tensor,
    bias_q: Tensor | None,
    down_q: Tensor | None,
    up_q: Tensor | None,
    weight_k: Tensor,
    bias_k: Tensor | None,
    down_k: Tensor | None,
    up_k: Tensor | None,
    weight_v: Tensor,
    bias_v: Tensor | None,
    down_v: Tensor | None,
    up_v: Tensor | None,
    weight_out: Tensor,
    bias_out: Tensor | None,
    down_out: Tensor | None,
    up_out: Tensor | None,
    known_output: Tensor | None,
    known_softmax1: Tensor | None,
    known_softmax2: Tensor | None,
    normed: bool,
    eps: float,
    heads: int,
    scales: list[float],
    keeps: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    density: float,
) -> list[Tensor]:
    """y; unless known what is kept of the attention's output with its softmax, v and k."""
    tensors = (
        weight_q, bias_q, down_q, up_q, weight_k, bias_k, down_k, up_k,
        weight_v, bias_v, down_v, up_v, weight_out, bias_out, down_out, up_out,
    )  # fmt: skip
    *inward, out = _layers(tensors, scales, dtype)
    if known_output is not None:
        return [_as_tokens(project(_rows(known_output), out), x)]
    qkv = _projections(x, context, Norm(norm_weight, norm_bias, eps, normed), inward, dtype)[1]
    o_NHTD, softmax1, softmax2 = attend(*(_heads_first(rows, x.shape[0], heads) for rows in qkv))
    o_RC = o_NHTD.transpose(1, 2).reshape(qkv[0].shape[0], weight_v.shape[0])
    y = _as_tokens(project(o_RC, out), x)
    kept_output = (o_RC.view(*x.shape[:-1], weight_v.shape[0]), softmax1, softmax2) if keeps else ()
    return [y, *kept_output, *(qkv[2], qkv[1])[: max(keeps - 1, 0)]]


_op.register_fake(_op._init_fn)


@torch.library.custom_op("lightning_aigc::lora_attention_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor,
    context: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight_q: Tensor,
    bias_q: Tensor | None,
    down_q: Tensor | None,
    up_q: Tensor | None,
    weight_k: Tensor,
    bias_k: Tensor | None,
    down_k: Tensor | None,
    up_k: Tensor | None,
    weight_v: Tensor,
    bias_v: Tensor | None,
    down_v: Tensor | None,
    up_v: Tensor | None,
    weight_out: Tensor,
    bias_out: Tensor | None,
    down_out: Tensor | None,
    up_out: Tensor | None,
    kept: list[Tensor],
    needs: list[bool],
    normed: bool,
    eps: float,
    heads: int,
    scales: list[float],
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    density: float,
) -> list[Tensor]:
    """Gradients of those among x, context, the norm's two and the layers' sixteen tensors that `needs` names."""
    grad_dtype = backward_dtype(grad_dtype, dtype)
    samples = x.shape[0]
    tensors = (
        weight_q, bias_q, down_q, up_q, weight_k, bias_k, down_k, up_k,
        weight_v, bias_v, down_v, up_v, weight_out, bias_out, down_out, up_out,
    )  # fmt: skip
    norm = Norm(norm_weight, norm_bias, eps, normed)
    *inward, out = _layers(tensors, scales, grad_dtype)
    needs_of: list[Any] = [tuple(needs[4 + 4 * i : 8 + 4 * i]) for i in range(4)]

    output, kept_vk = kept[:3], kept[3:]
    normalized, qkv = _projections(x, context, norm, _layers(tensors, scales, dtype)[:3], dtype, kept_vk)
    if not output:
        o_NHTD, *softmax = attend(*(_heads_first(rows, samples, heads) for rows in qkv))
        output = [o_NHTD.transpose(1, 2).reshape(-1, weight_v.shape[0]), *softmax]
    dy_RC, o_RC = _rows(dy).to(grad_dtype), _rows(output[0]).to(grad_dtype)
    dout = parameter_gradients(dy_RC, o_RC, out, needs_of[3])
    do_RC = add_input_gradient(None, dy_RC, out)
    heads_first = [_heads_first(rows.to(grad_dtype), samples, heads) for rows in (do_RC, *qkv, o_RC)]
    do, q, k, v, o = heads_first
    dqkv_NHTD: tuple[Tensor, ...] = attend_backward(do, q, k, v, o, *output[1:])
    del heads_first, do_RC, o_RC, qkv, output, do, q, k, v, o
    if density < 1:
        dqkv_NHTD = tuple(keep_largest_per_head(d, density) for d in dqkv_NHTD)
    dqkv_RC = [
        d.transpose(1, 2).reshape(d.shape[0] * d.shape[2], layer.weight.shape[0])
        for d, layer in zip(dqkv_NHTD, inward, strict=True)
    ]
    del dqkv_NHTD

    normalized_RC = normalized.value.to(grad_dtype)
    source_RC = normalized_RC if context is None else _rows(context).to(grad_dtype)
    sources = normalized_RC, source_RC, source_RC
    dlayers = [
        parameter_gradients(d, source, layer, need)
        for d, source, layer, need in zip(dqkv_RC, sources, inward, needs_of[:3], strict=True)
    ]
    dnormalized_RC = add_input_gradient(None, dqkv_RC[0], inward[0])
    dcontext_RC = None
    for d, layer in zip(dqkv_RC[1:], inward[1:], strict=True):
        if context is None:
            dnormalized_RC = add_input_gradient(dnormalized_RC, d, layer)
        elif needs[1]:
            dcontext_RC = add_input_gradient(dcontext_RC, d, layer)
    dx_RC, dnorm_weight, dnorm_bias = normalize_backward(dnormalized_RC, _rows(x), norm, normalized, needs[2], needs[3])
    dcontext = dcontext_RC.view(context.shape) if context is not None and dcontext_RC is not None else None
    grads = (dx_RC.view(x.shape), dcontext, dnorm_weight, dnorm_bias, *(g for d in (*dlayers, dout) for g in d))
    of = (x, context, norm_weight, norm_bias, *tensors)
    return [
        g.to(t.dtype) for g, t, need in zip(grads, of, needs, strict=True) if need and g is not None and t is not None
    ]


@_backward_op.register_fake
def _(dy, x, context, norm_weight, norm_bias, *others):  # type: ignore[no-untyped-def]
    tensors, needs = (x, context, norm_weight, norm_bias, *others[:16]), others[17]
    return [t.new_empty(t.shape) for t, need in zip(tensors, needs, strict=True) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, known = inputs[:20], inputs[20:23]
    normed, eps, heads, scales, _, dtype, grad_dtype, density = inputs[23:]
    ctx.options = normed, eps, heads, scales, dtype, grad_dtype, density
    _, *made = output
    ctx.save_for_backward(*tensors, *(made if known[0] is None else known))
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    if grads[0] is None:
        return (None,) * 31
    saved = ctx.saved_tensors  # read once: under checkpointing a second reading is an error
    tensors, kept = saved[:20], saved[20:]
    needs = list(ctx.needs_input_grad[:20])
    given = iter(_call_backward(grads[0], *tensors, list(kept), needs, *ctx.options))
    return *(next(given) if need else None for need in needs), *(None,) * 11


_backward_op.register_autograd(no_second_derivative("lora_attention"))
_op.register_autograd(_autograd, setup_context=_setup_context)
_call = direct(_op, _setup_context, _autograd)
_call_backward = direct_backward(_backward_op)


def _layers(tensors: Sequence[Any], scales: Sequence[float], dtype: torch.dtype) -> list[Projection]:
    """The query, key, value and output layers of an op's flat arguments."""
    layers = []
    for i, scale in enumerate(scales):
        weight, bias, down, up = tensors[4 * i : 4 * i + 4]
        layers.append(Projection(weight, bias, down, up, scale).to(dtype))
    return layers


def _as_tokens(rows_RC: Tensor, x: Tensor) -> Tensor:
    # What an autograd.Function returns as a view may not be changed in place; nobody else has this memory.
    tokens: Tensor = aten._unsafe_view(rows_RC, (*x.shape[:-1], rows_RC.shape[-1]))
    return tokens


def _rows(tokens: Tensor) -> Tensor:
    return tokens.reshape(-1, tokens.shape[-1])


def _heads_first(rows_RC: Tensor, samples: int, heads: int) -> Tensor:
    tokens = rows_RC.shape[0] // samples if samples else 0
    return rows_RC.view(samples, tokens, heads, rows_RC.shape[-1] // heads).transpose(1, 2)


def _projections(
    x: Tensor,
    context: Tensor | None,
    norm: Norm,
    layers: Sequence[Projection],
    dtype: torch.dtype,
    kept_vk: Sequence[Tensor] = (),
) -> tuple[Normalized, tuple[Tensor, ...]]:
    """The normalised x, and q, k, v as rows, of which v, or v and k, may have been kept."""
    normalized = normalize(_rows(x), norm, dtype)
    source_RC = normalized.value if context is None else _rows(context).to(dtype)
    sources = normalized.value, source_RC, source_RC
    computed = [project(source, layer) for source, layer in list(zip(sources, layers, strict=True))[: 3 - len(kept_vk)]]
    return normalized, (*computed, *reversed(kept_vk))
