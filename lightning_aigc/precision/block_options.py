"""What a block can save for backward: its options, each with its bytes and the operations that backward repeats.

Operations are those of matrix products, convolutions and attention, 2 for each multiplication with its addition.
Dimensions: N samples, T tokens or pixels of x, S tokens that x attends to.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_aigc.precision import recompute
from lightning_aigc.precision.attention_blocks import ATTENTION, attention_layers
from lightning_aigc.precision.feed_forward_blocks import feed_forward_layers
from lightning_aigc.precision.fused_forward import Keeps, choices_of
from lightning_aigc.precision.layers import CannotSwapError, class_path
from lightning_aigc.precision.selective import ALL as EVERYTHING
from lightning_aigc.precision.selective import Result, Saves, in_order_of_worth
from lightning_aigc_kernels import Projection

RESNET = "diffusers.models.resnet.ResnetBlock2D"
TRANSFORMER_BLOCK = "diffusers.models.attention.BasicTransformerBlock"
TRANSFORMER = "diffusers.models.transformers.transformer_2d.Transformer2DModel"
FEED_FORWARD = "diffusers.models.attention.FeedForward"

ALL = Keeps(*(frozenset({"output", "value", "key", "query"}),) * 2, projection=True, block=Saves(EVERYTHING))
STATISTICS_BYTES = 4
"""Of an attention's softmax, for each query and head, on a CPU and CUDA."""


class Option(NamedTuple):
    """One way to save a block's activations."""

    keeps: Keeps | None
    """None: the block runs again in backward."""
    saved_bytes: int
    """Beyond what `Keeps()` saves; 0 for a block that runs again."""
    repeated: float
    """Operations that backward repeats."""


class _Part(NamedTuple):
    """One way to save a part of a block."""

    kept: Any
    saved_bytes: int
    repeated: float


def is_optional(module: nn.Module) -> bool:
    """Whether this swapped module has a choice of what to save."""
    kind = class_path(module)
    if choices_of(module).is_whole:
        return True
    return kind in (RESNET, TRANSFORMER_BLOCK, ATTENTION, FEED_FORWARD) or is_one_block_transformer(module)


def is_one_block_transformer(module: Any) -> bool:
    """Whether this is a transformer around one block, which runs again with it."""
    return class_path(module) == TRANSFORMER and len(module.transformer_blocks) == 1


def options_of(module: Any, args: Sequence[Any], kwargs: dict[str, Any], itemsize: int) -> list[Option]:
    """The options of a call: the block run again, if it can be, then all ways to save it.

    Args: itemsize is the bytes of a number in the dtype that the call computes in.
    """
    kind = class_path(module)
    x: Tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    if kind == RESNET:
        first = 2.0 * x.shape[0] * x[0, 0].numel() * _weights(module.conv1)
        return [Option(None, 0, first), Option(Keeps(), 0, 0.0)]
    if kind == ATTENTION:
        samples, tokens = x.shape[0], x.shape[1] if x.dim() == 3 else x[0, 0].numel()
        context = _context(args, kwargs)
        parts = _attention(module, samples, tokens, context, itemsize, least=frozenset({"output"}))
        return [Option(Keeps(attn1=kept, attn2=kept), nbytes, repeated) for kept, nbytes, repeated in parts]
    if kind == FEED_FORWARD:
        parts = _feed_forward(module, x.numel() // x.shape[-1], itemsize)
        return [Option(Keeps(projection=kept), nbytes, repeated) for kept, nbytes, repeated in parts]
    around, block = 0.0, module
    if kind == TRANSFORMER:
        tokens, block = x[0, 0].numel(), module.transformer_blocks[0]
        around = 2.0 * x.shape[0] * tokens * _weights(module.proj_in)
    else:
        tokens = x.shape[1]
    return _block(block, x.shape[0], tokens, _context(args, kwargs), itemsize, around)


def options_of_whole(results: Sequence[Result], least_inner: int) -> list[Option]:
    """The options of a transformer's block that runs again, by what its run made: nothing saved, and ever more of its
    attentions and products of that inner dimension. What backward does not read is neither saved nor repeated."""
    repeated = sum(result.operations for result in results if result.is_read)
    found, nbytes = [Option(None, 0, repeated)], 0
    for i in in_order_of_worth(results, least_inner):
        nbytes += results[i].nbytes
        repeated -= results[i].operations
        found.append(Option(Keeps(block=Saves(nbytes, least_inner)), nbytes, repeated))
    return found


def _block(block: Any, samples: int, tokens: int, context: Tensor | None, itemsize: int, around: float) -> list[Option]:
    long = tokens >= recompute.LONG_ATTENTION_TOKENS
    attn1 = _attention(block.attn1, samples, tokens, None, itemsize, frozenset({"output"} if long else ()))
    attn2 = [_Part(frozenset(), 0, 0.0)]
    again = around + _attention_again(block.attn1, samples, tokens, tokens, long)
    if block.attn2 is not None:
        attn2 = _attention(block.attn2, samples, tokens, context, itemsize, frozenset())
        again += _attention_again(block.attn2, samples, tokens, tokens if context is None else context.shape[1], False)
    projections = _feed_forward(block.ff, samples * tokens, itemsize)
    again += max(part.repeated for part in projections)  # the second product is not read
    ways = itertools.product(attn1, attn2, projections)
    saved = [
        Option(Keeps(a.kept, b.kept, c.kept), a.saved_bytes + b.saved_bytes + c.saved_bytes,
               a.repeated + b.repeated + c.repeated)
        for a, b, c in ways
    ]  # fmt: skip
    return [Option(None, 0, again), *saved]


def _attention(
    module: Any, samples: int, tokens: int, context: Tensor | None, itemsize: int, least: frozenset[str]
) -> list[_Part]:
    """The ways to save an attention that include `least`; one that runs its class's forward has no choice."""
    try:
        query, key, value, _ = attention_layers(module)
    except CannotSwapError:
        return [_Part(frozenset(), 0, 0.0)]
    keys = tokens if context is None else context.shape[1]
    rows = {"query": samples * tokens, "key": samples * keys, "value": samples * keys}
    layers = {"query": query, "key": key, "value": value}
    nbytes = {name: rows[name] * layer.weight.shape[0] * itemsize for name, layer in layers.items()}
    width, heads = value.weight.shape[0], module.heads
    nbytes["output"] = samples * tokens * (width * itemsize + heads * STATISTICS_BYTES)
    saves = {name: _product(rows[name], layer) for name, layer in layers.items()}
    saves["output"] = _attend(samples, tokens, keys, query, value)
    found = []
    for count in range(len(saves) + 1):
        for kept in map(frozenset, itertools.combinations(saves, count)):
            if kept >= least:
                repeated = sum(operations for name, operations in saves.items() if name not in kept)
                found.append(_Part(kept, sum(nbytes[name] for name in kept), repeated))
    return found


def _attention_again(module: Any, samples: int, tokens: int, keys: int, long: bool) -> float:
    """Operations of an attention that runs again inside its block; a long one's output was saved."""
    width = module.inner_dim
    layers = (module.to_q, tokens), (module.to_k, keys), (module.to_v, keys), (module.to_out[0], tokens)
    products = sum(2.0 * samples * rows * _weights(layer) for layer, rows in layers)
    return products + (0.0 if long else 4.0 * samples * tokens * keys * width)


def _feed_forward(module: Any, rows: int, itemsize: int) -> list[_Part]:
    """The ways to save a gated feed-forward."""
    try:
        first, _, _ = feed_forward_layers(module)
    except CannotSwapError:
        return [_Part(False, 0, 0.0)]
    nbytes = rows * first.weight.shape[0] * itemsize
    return [_Part(False, 0, _product(rows, first)), _Part(True, nbytes, 0.0)]


def _product(rows: int, layer: Projection) -> float:
    """Operations of a layer's output, without LoRA's inner product, which backward computes in any case."""
    inner = 0 if layer.up is None else layer.up.numel()
    return 2.0 * rows * (layer.weight.numel() + inner)


def _attend(samples: int, tokens: int, keys: int, query: Projection, value: Projection) -> float:
    return 2.0 * samples * tokens * keys * (query.weight.shape[0] + value.weight.shape[0])


def _weights(layer: nn.Module) -> int:
    """Multiplications per output token or pixel of a layer with its adapters."""
    return sum(p.numel() for p in layer.parameters() if p.dim() > 1)


def _context(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    context = kwargs.get("encoder_hidden_states")
    if context is None and len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() == 3:
        context = args[1]
    return context if isinstance(context, Tensor) else None
