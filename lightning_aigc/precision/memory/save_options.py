"""Ways to save a block for backward, each with its bytes and the operations that backward repeats.

Operations are those of matrix products, convolutions and attention, 2 for each multiplication with its addition.
Dimensions: N samples, T tokens or pixels of x, S tokens that x attends to.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_aigc.precision.block_options import UNLIMITED, SavedParts, SaveLimit
from lightning_aigc.precision.blocks.attention import attention_layers
from lightning_aigc.precision.blocks.feed_forward import feed_forward_layers
from lightning_aigc.precision.blocks.layers import (
    ATTENTION,
    FEED_FORWARD,
    RESNET,
    TRANSFORMER,
    TRANSFORMER_BLOCK,
    CannotSwapError,
    class_path,
)
from lightning_aigc.precision.context import options_of
from lightning_aigc.precision.memory import recompute
from lightning_aigc.precision.memory.profile import Result, SaveOption
from lightning_aigc.precision.memory.selective import most_worth_saving
from lightning_aigc_kernels import LoRAProjection

EVERYTHING = SavedParts(
    *(frozenset({"output", "value", "key", "query"}),) * 2, projection=True, block=SaveLimit(UNLIMITED)
)
STATISTICS_BYTES = 4
"""Bytes of an attention's softmax statistics for each query and head, on a CPU and CUDA."""


class _PartOption(NamedTuple):
    """One way to save a part of a block."""

    saved: Any
    saved_bytes: int
    repeated: float


def exist_for(module: nn.Module) -> bool:
    """Whether there is more than one way to save this swapped module."""
    kind = class_path(module)
    if options_of(module).is_checkpointed_block:
        return True
    return kind in (RESNET, TRANSFORMER_BLOCK, ATTENTION, FEED_FORWARD) or is_one_block_transformer(module)


def is_one_block_transformer(module: Any) -> bool:
    """Whether this is a transformer around one block, which is recomputed together with it."""
    return class_path(module) == TRANSFORMER and len(module.transformer_blocks) == 1


def of_block(module: Any, args: Sequence[Any], kwargs: dict[str, Any], itemsize: int) -> list[SaveOption]:
    """Return the save options of a call: recompute the block, if possible, then all ways to save it.

    Args: itemsize: Bytes of a number in the dtype that the call computes in.
    """
    kind = class_path(module)
    x: Tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    if kind == RESNET:
        first = 2.0 * x.shape[0] * x[0, 0].numel() * _weights(module.conv1)
        return [SaveOption(None, 0, first), SaveOption(SavedParts(), 0, 0.0)]
    if kind == ATTENTION:
        samples, tokens = x.shape[0], x.shape[1] if x.dim() == 3 else x[0, 0].numel()
        context = _context(args, kwargs)
        parts = _attention(module, samples, tokens, context, itemsize, least=frozenset({"output"}))
        return [SaveOption(SavedParts(attn1=names, attn2=names), nbytes, repeated) for names, nbytes, repeated in parts]
    if kind == FEED_FORWARD:
        parts = _feed_forward(module, x.numel() // x.shape[-1], itemsize)
        return [SaveOption(SavedParts(projection=saved), nbytes, repeated) for saved, nbytes, repeated in parts]
    around, block = 0.0, module
    if kind == TRANSFORMER:
        tokens, block = x[0, 0].numel(), module.transformer_blocks[0]
        around = 2.0 * x.shape[0] * tokens * _weights(module.proj_in)
    else:
        tokens = x.shape[1]
    return _block(block, x.shape[0], tokens, _context(args, kwargs), itemsize, around)


def of_checkpointed_block(results: Sequence[Result], min_inner_dim: int) -> list[SaveOption]:
    """Return the save options of a checkpointed block with these results: from nothing saved to all worth saving.

    Results that backward does not read are neither saved nor repeated.
    """
    repeated = sum(result.operations for result in results if result.is_read)
    options, nbytes = [SaveOption(None, 0, repeated)], 0
    for i in most_worth_saving(results, min_inner_dim):
        nbytes += results[i].nbytes
        repeated -= results[i].operations
        options.append(SaveOption(SavedParts(block=SaveLimit(nbytes, min_inner_dim)), nbytes, repeated))
    return options


def _block(
    block: Any, samples: int, tokens: int, context: Tensor | None, itemsize: int, around: float
) -> list[SaveOption]:
    long = tokens >= recompute.LONG_ATTENTION_TOKENS
    attn1 = _attention(block.attn1, samples, tokens, None, itemsize, frozenset({"output"} if long else ()))
    attn2 = [_PartOption(frozenset(), 0, 0.0)]
    repeated = around + _recomputed_attention(block.attn1, samples, tokens, tokens, long)
    if block.attn2 is not None:
        attn2 = _attention(block.attn2, samples, tokens, context, itemsize, frozenset())
        keys = tokens if context is None else context.shape[1]
        repeated += _recomputed_attention(block.attn2, samples, tokens, keys, False)
    projections = _feed_forward(block.ff, samples * tokens, itemsize)
    repeated += max(part.repeated for part in projections)  # the second product is not read
    saved = [
        SaveOption(
            SavedParts(a.saved, b.saved, c.saved),
            a.saved_bytes + b.saved_bytes + c.saved_bytes,
            a.repeated + b.repeated + c.repeated,
        )
        for a, b, c in itertools.product(attn1, attn2, projections)
    ]
    return [SaveOption(None, 0, repeated), *saved]


def _attention(
    module: Any, samples: int, tokens: int, context: Tensor | None, itemsize: int, least: frozenset[str]
) -> list[_PartOption]:
    """Return the ways to save an attention that include `least`; an attention that is not fused has one way."""
    try:
        query, key, value, _ = attention_layers(module)
    except CannotSwapError:
        return [_PartOption(frozenset(), 0, 0.0)]
    keys = tokens if context is None else context.shape[1]
    rows = {"query": samples * tokens, "key": samples * keys, "value": samples * keys}
    layers = {"query": query, "key": key, "value": value}
    nbytes = {name: rows[name] * layer.weight.shape[0] * itemsize for name, layer in layers.items()}
    width, heads = value.weight.shape[0], module.heads
    nbytes["output"] = samples * tokens * (width * itemsize + heads * STATISTICS_BYTES)
    operations = {name: _product(rows[name], layer) for name, layer in layers.items()}
    operations["output"] = _attend(samples, tokens, keys, query, value)
    options = []
    for count in range(len(operations) + 1):
        for saved in map(frozenset, itertools.combinations(operations, count)):
            if saved >= least:
                repeated = sum(cost for name, cost in operations.items() if name not in saved)
                options.append(_PartOption(saved, sum(nbytes[name] for name in saved), repeated))
    return options


def _recomputed_attention(module: Any, samples: int, tokens: int, keys: int, long: bool) -> float:
    """Count the operations of an attention recomputed inside its block; the output of a long one was saved."""
    width = module.inner_dim
    layers = (module.to_q, tokens), (module.to_k, keys), (module.to_v, keys), (module.to_out[0], tokens)
    products = sum(2.0 * samples * rows * _weights(layer) for layer, rows in layers)
    return products + (0.0 if long else 4.0 * samples * tokens * keys * width)


def _feed_forward(module: Any, rows: int, itemsize: int) -> list[_PartOption]:
    """Return the ways to save a gated feed-forward."""
    try:
        first, _, _ = feed_forward_layers(module)
    except CannotSwapError:
        return [_PartOption(False, 0, 0.0)]
    nbytes = rows * first.weight.shape[0] * itemsize
    return [_PartOption(False, 0, _product(rows, first)), _PartOption(True, nbytes, 0.0)]


def _product(rows: int, layer: LoRAProjection) -> float:
    """Count the operations of a layer's output, without LoRA's inner product, which backward computes in any case."""
    inner = 0 if layer.up is None else layer.up.numel()
    return 2.0 * rows * (layer.weight.numel() + inner)


def _attend(samples: int, tokens: int, keys: int, query: LoRAProjection, value: LoRAProjection) -> float:
    return 2.0 * samples * tokens * keys * (query.weight.shape[0] + value.weight.shape[0])


def _weights(layer: nn.Module) -> int:
    """Count the multiplications per output token or pixel of a layer with its adapters."""
    return sum(p.numel() for p in layer.parameters() if p.dim() > 1)


def _context(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    context = kwargs.get("encoder_hidden_states")
    if context is None and len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() == 3:
        context = args[1]
    return context if isinstance(context, Tensor) else None
