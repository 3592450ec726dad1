"""Forward and backward of an attention with its norm and projections, without autograd.

Dimensions: N samples, H heads, T tokens of x, S of the context, C features; a flat token dimension is written R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_aigc_kernels.dispatch import backward_dtype
from lightning_aigc_kernels.keep_largest.op import keep_largest_per_head
from lightning_aigc_kernels.linear_with_lora import (
    Needs,
    Projection,
    ProjectionGradients,
    add_input_gradient,
    parameter_gradients,
    project,
)
from lightning_aigc_kernels.lora_attention.core import attend, attend_backward
from lightning_aigc_kernels.normalization import Norm, Normalized, normalize, normalize_backward
from lightning_aigc_kernels.rows import in_shape_of, rows_of


@dataclass(frozen=True)
class Block:
    """An attention's norm and projections, and the dtype of the forward's products."""

    norm: Norm
    inward: list[Projection]
    """Query, key and value."""
    out: Projection
    heads: int
    dtype: torch.dtype


def forward(
    x: Tensor, context: Tensor | None, block: Block, keeps: int, known_output: Tensor | None = None
) -> list[Tensor]:
    """Return y and the tensors to save: the first `keeps` of the attention's output with its softmax, v and k.

    With `known_output` the attention is skipped, and only y is returned.
    """
    out = block.out.to(block.dtype)
    if known_output is not None:
        return [in_shape_of(x, project(rows_of(known_output), out))]
    qkv = _projections(x, context, block)[1]
    o_NHTD, softmax1, softmax2 = attend(*(_heads_first(rows, x.shape[0], block.heads) for rows in qkv))
    features = block.inward[2].weight.shape[0]
    o_RC = o_NHTD.transpose(1, 2).reshape(qkv[0].shape[0], features)
    y = in_shape_of(x, project(o_RC, out))
    kept_output = (o_RC.view(*x.shape[:-1], features), softmax1, softmax2) if keeps else ()
    return [y, *kept_output, *(qkv[2], qkv[1])[: max(keeps - 1, 0)]]


def backward(
    dy: Tensor,
    x: Tensor,
    context: Tensor | None,
    block: Block,
    kept: Sequence[Tensor],
    needs: Sequence[bool],
    grad_dtype: torch.dtype | None,
    density: float,
) -> list[Tensor | None]:
    """The gradients of x, the context, the norm's two and the layers' sixteen tensors.

    Args: kept is `forward`'s result without y; needs selects among the twenty: the others may be None.
    """
    grad_dtype = backward_dtype(grad_dtype, block.dtype)
    inward, out = [layer.to(grad_dtype) for layer in block.inward], block.out.to(grad_dtype)
    _, need_context, need_weight, need_bias, *need_layers = needs
    needs_of = [Needs(*need_layers[4 * i : 4 * i + 4]) for i in range(4)]
    normalized, dqkv_RC, dout = _attention_backward(dy, x, context, block, out, kept, needs_of[3], density)

    normalized_RC = normalized.value.to(grad_dtype)
    source_RC = normalized_RC if context is None else rows_of(context).to(grad_dtype)
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
        elif need_context:
            dcontext_RC = add_input_gradient(dcontext_RC, d, layer)
    dx_RC, *dnorm = normalize_backward(dnormalized_RC, rows_of(x), block.norm, normalized, need_weight, need_bias)
    dcontext = dcontext_RC.view(context.shape) if context is not None and dcontext_RC is not None else None
    return [dx_RC.view(x.shape), dcontext, *dnorm, *(gradient for layer in (*dlayers, dout) for gradient in layer)]


def _attention_backward(
    dy: Tensor,
    x: Tensor,
    context: Tensor | None,
    block: Block,
    out: Projection,
    kept: Sequence[Tensor],
    needs_out: Needs,
    density: float,
) -> tuple[Normalized, list[Tensor], ProjectionGradients]:
    """The recomputed normalised x, the gradients of q, k and v as rows, and those of the output projection `out`."""
    samples, grad_dtype = x.shape[0], out.weight.dtype
    output, kept_vk = list(kept[:3]), kept[3:]
    normalized, qkv = _projections(x, context, block, kept_vk)
    if not output:
        o_NHTD, *softmax = attend(*(_heads_first(rows, samples, block.heads) for rows in qkv))
        output = [o_NHTD.transpose(1, 2).reshape(-1, block.inward[2].weight.shape[0]), *softmax]
    dy_RC, o_RC = rows_of(dy).to(grad_dtype), rows_of(output[0]).to(grad_dtype)
    dout = parameter_gradients(dy_RC, o_RC, out, needs_out)
    do_RC = add_input_gradient(None, dy_RC, out)
    heads_first = [_heads_first(rows.to(grad_dtype), samples, block.heads) for rows in (do_RC, *qkv, o_RC)]
    do, q, k, v, o = heads_first
    dqkv_NHTD: tuple[Tensor, ...] = attend_backward(do, q, k, v, o, *output[1:])
    del heads_first, do_RC, o_RC, qkv, output, do, q, k, v, o  # frees memory for the gradients' rows
    if density < 1:
        dqkv_NHTD = tuple(keep_largest_per_head(d, density) for d in dqkv_NHTD)
    dqkv_RC = [
        d.transpose(1, 2).reshape(d.shape[0] * d.shape[2], layer.weight.shape[0])
        for d, layer in zip(dqkv_NHTD, block.inward, strict=True)
    ]
    return normalized, dqkv_RC, dout


def _projections(
    x: Tensor, context: Tensor | None, block: Block, kept_vk: Sequence[Tensor] = ()
) -> tuple[Normalized, tuple[Tensor, ...]]:
    """The normalised x, and q, k and v as rows, computed except for a saved v, or v and k."""
    normalized = normalize(rows_of(x), block.norm, block.dtype)
    source_RC = normalized.value if context is None else rows_of(context).to(block.dtype)
    sources = normalized.value, source_RC, source_RC
    missing = list(zip(sources, block.inward, strict=True))[: 3 - len(kept_vk)]
    computed = [project(source, layer.to(block.dtype)) for source, layer in missing]
    return normalized, (*computed, *reversed(kept_vk))


def _heads_first(rows_RC: Tensor, samples: int, heads: int) -> Tensor:
    tokens = rows_RC.shape[0] // samples if samples else 0
    return rows_RC.view(samples, tokens, heads, rows_RC.shape[-1] // heads).transpose(1, 2)
