"""Table of gradient sync modes: the data that each sends, and over which ranks. Needs no torch.

Both `gradient_sync`, which runs the modes, and `cost_model`, which predicts them, read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mode = Literal[
    "auto", "dense", "bf16", "int8", "int4", "int3", "ternary",
    "sparse", "sparse_int8", "sparse_int4", "two_four", "local",
]  # fmt: skip
DEFAULT_MODE: Mode = "int3"
Average = Literal["float32", "int8", "int4", "int3", "top_k"]
"""Format of the averages of mode local on the wire."""
AVERAGE_BITS: dict[Average, int | None] = {"float32": None, "int8": 8, "int4": 4, "int3": 3, "top_k": None}
"""Bits of a value of an average, where all values are sent as integers."""
TOP_K_CHUNK = 4096
"""Values of which an average in top_k sends the largest."""
TOP_K_POSITIONS = TOP_K_CHUNK // 12
"""Most values of a chunk that are sent with positions of 12 bits; of more, a bitmap of the chunk is smaller."""
TOP_K_SIZE_BYTES = 2
"""Bytes of a size that the sent values of a chunk have, a bfloat16."""


def top_k_parts(top_k: int) -> tuple[int, int, int]:
    """Return the bytes of a chunk in an average in top_k: of its sizes, its places, and its values.

    Up to TOP_K_POSITIONS values have a position, a sign, and one of two sizes; more have a bitmap, a sign and one size.
    """
    if top_k <= TOP_K_POSITIONS:
        return 2 * TOP_K_SIZE_BYTES, top_k * 12 // 8, top_k * 2 // 8
    return TOP_K_SIZE_BYTES, TOP_K_CHUNK // 8, top_k // 8


def average_bytes(average: Average, top_k: int) -> float:
    """Return the bytes of a value in an average, with its share of sizes and places."""
    if average == "top_k":
        return sum(top_k_parts(top_k)) / TOP_K_CHUNK
    bits = AVERAGE_BITS[average]
    return 4 if bits is None else (bits + 16 / 32) / 8  # a bfloat16 for 32 values


AVERAGE_HOPS = 2
"""local: most collectives of an average, its shards and their sums; overlapped, one per step."""


@dataclass(frozen=True)
class ModeTraits:
    """Properties of a mode."""

    value_bits: int | None = None
    """Bits of a quantized value; None where values travel in a floating-point type."""
    is_block_sparse: bool = False
    """Whether it sends some blocks of a gradient and leaves the others in the residual."""
    needs_dense_first_step: bool = False
    """Whether it selects by the last sum, which the first step must provide."""
    is_exact: bool = False
    """Whether it is lossless, so that it has no residual."""
    is_flat: bool = False
    """Whether it reduces over all ranks at once, even with many nodes."""


MODES: dict[str, ModeTraits] = {
    "dense": ModeTraits(is_exact=True, is_flat=True),
    "bf16": ModeTraits(),
    "int8": ModeTraits(value_bits=8),
    "int4": ModeTraits(value_bits=4),
    "int3": ModeTraits(value_bits=3),
    "ternary": ModeTraits(),
    "sparse": ModeTraits(is_block_sparse=True, needs_dense_first_step=True),
    "sparse_int8": ModeTraits(value_bits=8, is_block_sparse=True, needs_dense_first_step=True),
    "sparse_int4": ModeTraits(value_bits=4, is_block_sparse=True, needs_dense_first_step=True),
    "two_four": ModeTraits(needs_dense_first_step=True),
    "local": ModeTraits(is_exact=True, is_flat=True),
}
"""Every mode but `auto`, which chooses among them."""

AUTO_MODES: tuple[Mode, ...] = ("dense", "bf16", "int8", "int4", "int3")
"""Candidates of `auto`, from exact to coarse."""
WORTHWHILE = 0.7
"""A less exact mode must bring gradient sync below this share of the time to be chosen."""
NOT_WORTH_S = 2e-3
"""Below this a dense sync stays as it is."""


def worthwhile_mode(seconds: Mapping[Mode, float]) -> Mode:
    """Return the choice of `auto` for these seconds of a step's gradient sync: the more exact mode when in doubt."""
    chosen: Mode = "dense"
    for mode in AUTO_MODES:
        if seconds["dense"] > NOT_WORTH_S and seconds[mode] < WORTHWHILE * seconds[chosen]:
            chosen = mode
    return chosen


SPARSE_MODES = tuple(mode for mode, traits in MODES.items() if traits.is_block_sparse)
QUANTIZED_MODES = tuple(mode for mode, traits in MODES.items() if traits.value_bits and not traits.is_block_sparse)
EXACT_MODES = tuple(mode for mode, traits in MODES.items() if traits.is_exact)
FLAT_MODES = tuple(mode for mode, traits in MODES.items() if traits.is_flat)
