"""Forward and backward of an attention with its norm and projections, without autograd.

Dimensions: N samples, H heads, T tokens of x, S of the context, C features; a flat token dimension is written R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.dispatch import backward_dtype, cast
from lightning_aigc_kernels.keep_largest.op import keep_largest_per_head
from lightning_aigc_kernels.linear_with_lora import (
    LoRAProjection,
    Needs,
    ProjectionGradients,
    add_input_gradient,
    inner,
    inner_gradient,
    parameter_gradients,
    project,
)
from lightning_aigc_kernels.lora_attention.core import attend, attend_backward
from lightning_aigc_kernels.matmul import in_shape_of, rows_of
from lightning_aigc_kernels.normalization import Normalized, NormParameters, normalize, normalize_backward

OUTPUT, VALUE, KEY, QUERY = 1, 2, 4, 8
"""Bits of what is saved for backward; the attention's output counts as three tensors, with its two softmax tensors."""


@dataclass(frozen=True)
class Block:
    """An attention's norm and projections, and the dtype of the forward's products."""

    norm: NormParameters
    inward: list[LoRAProjection]
    """Query, key and value."""
    out: LoRAProjection
    heads: int
    dtype: torch.dtype


def forward(
    x: Tensor, context: Tensor | None, block: Block, keeps: int, known_output: Tensor | None = None
) -> list[Tensor]:
    """Return y and the tensors to save, by the bits of `keeps`: the attention's output with its softmax, v, k and q.

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
    kept_output = (o_RC.view(*x.shape[:-1], features), softmax1, softmax2) if keeps & OUTPUT else ()
    kept_rows = (rows for bit, rows in zip((VALUE, KEY, QUERY), reversed(qkv), strict=True) if keeps & bit)
    return [y, *kept_output, *kept_rows]


def backward(
    dy: Tensor,
    x: Tensor,
    context: Tensor | None,
    block: Block,
    kept: Sequence[Tensor],
    keeps: int,
    needs: Sequence[bool],
    grad_dtype: torch.dtype | None,
    density: float,
) -> list[Tensor | None]:
    """The gradients of x, the context, the norm's two and the layers' sixteen tensors.

    Args: kept is `forward`'s result without y, and keeps its bits; needs selects among the twenty: the others may
        be None.
    """
    grad_dtype = backward_dtype(grad_dtype, block.dtype)
    inward, out = [layer.to(grad_dtype) for layer in block.inward], block.out.to(grad_dtype)
    _, need_context, need_weight, need_bias, *need_layers = needs
    needs_of = [Needs(*need_layers[4 * i : 4 * i + 4]) for i in range(4)]
    saved = _Saved.of(kept, keeps)
    normalized, inners, dqkv_RC, dout = _attention_backward(dy, x, context, block, out, saved, needs_of[3], density)
    if grad_dtype != block.dtype:
        inners = [None] * 3

    normalized_RC = cast(normalized.value, grad_dtype)
    source_RC = normalized_RC if context is None else cast(rows_of(context), grad_dtype)
    sources = normalized_RC, source_RC, source_RC
    dlayers: list[ProjectionGradients] = []
    dnormalized_RC: Any = None
    dcontext_RC = None
    for i, (d, layer) in enumerate(zip(dqkv_RC, inward, strict=True)):
        dinner_RR = inner_gradient(d, layer)  # made once for both of its uses
        dlayers.append(parameter_gradients(d, sources[i], layer, needs_of[i], inners[i], dinner_RR))
        if i == 0 or context is None:
            dnormalized_RC = add_input_gradient(dnormalized_RC, d, layer, dinner_RR)
        elif need_context:
            dcontext_RC = add_input_gradient(dcontext_RC, d, layer, dinner_RR)
    dx_RC, *dnorm = normalize_backward(dnormalized_RC, rows_of(x), block.norm, normalized, need_weight, need_bias)
    dcontext = dcontext_RC.view(context.shape) if context is not None and dcontext_RC is not None else None
    return [dx_RC.view(x.shape), dcontext, *dnorm, *(gradient for layer in (*dlayers, dout) for gradient in layer)]


@dataclass(frozen=True)
class _Saved:
    """Tensors that the forward pass saved."""

    output: list[Tensor]
    """The attention's output and its two softmax tensors, or nothing."""
    qkv: tuple[Tensor | None, Tensor | None, Tensor | None]
    """Query, key and value as rows."""

    @staticmethod
    def of(kept: Sequence[Tensor], keeps: int) -> _Saved:
        """Undo `forward`'s packing."""
        first = 3 if keeps & OUTPUT else 0
        rows = iter(kept[first:])
        v, k, q = (next(rows) if keeps & bit else None for bit in (VALUE, KEY, QUERY))
        return _Saved(list(kept[:first]), (q, k, v))


def _attention_backward(
    dy: Tensor,
    x: Tensor,
    context: Tensor | None,
    block: Block,
    out: LoRAProjection,
    saved: _Saved,
    needs_out: Needs,
    density: float,
) -> tuple[Normalized, list[Tensor | None], list[Tensor], ProjectionGradients]:
    """The recomputed normalised x and LoRA's inner tensors, the gradients of q, k and v as rows, and those of `out`."""
    samples, grad_dtype = x.shape[0], out.weight.dtype
    output = saved.output
    normalized, qkv, inners = _projections(x, context, block, saved.qkv)
    if not output:
        o_NHTD, *softmax = attend(*(_heads_first(rows, samples, block.heads) for rows in qkv))
        output = [o_NHTD.transpose(1, 2).reshape(-1, block.inward[2].weight.shape[0]), *softmax]
    dy_RC, o_RC = cast(rows_of(dy), grad_dtype), cast(rows_of(output[0]), grad_dtype)
    dinner_RR = inner_gradient(dy_RC, out)
    dout = parameter_gradients(dy_RC, o_RC, out, needs_out, dinner_TR=dinner_RR)
    do_RC = add_input_gradient(None, dy_RC, out, dinner_RR)
    heads_first = [_heads_first(cast(rows, grad_dtype), samples, block.heads) for rows in (do_RC, *qkv, o_RC)]
    do, q, k, v, o = heads_first
    dqkv_NHTD: tuple[Tensor, ...] = attend_backward(do, q, k, v, o, *output[1:])
    del heads_first, do_RC, o_RC, qkv, output, do, q, k, v, o  # frees memory for the gradients' rows
    if density < 1:
        dqkv_NHTD = tuple(keep_largest_per_head(d, density) for d in dqkv_NHTD)
    dqkv_RC = [
        d.transpose(1, 2).reshape(d.shape[0] * d.shape[2], layer.weight.shape[0])
        for d, layer in zip(dqkv_NHTD, block.inward, strict=True)
    ]
    return normalized, inners, dqkv_RC, dout


def _projections(
    x: Tensor, context: Tensor | None, block: Block, saved_qkv: Sequence[Tensor | None] = (None, None, None)
) -> tuple[Normalized, tuple[Tensor, ...], list[Tensor | None]]:
    """The normalised x, q, k and v as rows, computed unless saved, and LoRA's inner tensors of the computed ones."""
    normalized = normalize(rows_of(x), block.norm, block.dtype)
    source_RC = normalized.value if context is None else cast(rows_of(context), block.dtype)
    qkv: list[Tensor] = []
    inners: list[Tensor | None] = [None, None, None]
    for i, (layer, saved) in enumerate(zip(block.inward, saved_qkv, strict=True)):
        if saved is None:
            source, in_dtype = normalized.value if i == 0 else source_RC, layer.to(block.dtype)
            inners[i] = inner(source, in_dtype)
            saved = project(source, in_dtype, inners[i])
        qkv.append(saved)
    return normalized, tuple(qkv), inners


def _heads_first(rows_RC: Tensor, samples: int, heads: int) -> Tensor:
    tokens = rows_RC.shape[0] // samples if samples else 0
    return rows_RC.view(samples, tokens, heads, rows_RC.shape[-1] // heads).transpose(1, 2)
