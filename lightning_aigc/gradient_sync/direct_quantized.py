"""Quantized sync on a CPU without a flat vector: from gradients to the wire, and from the wire into gradients.

`UnitReducer` flattens a unit, a `Quantized` reduction packs, adds and unpacks it, and the sum is written back: eight
passes over memory. Here are three, with the same sums and the same residuals.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.gradient_sync.collectives import CountedGroup
from lightning_aigc.gradient_sync.flat_units import ALIGNMENT, Entry, FlatUnit
from lightning_aigc.gradient_sync.quantization import BlockQuantizer
from lightning_aigc.gradient_sync.residual import Residuals


@dataclass(frozen=True)
class Piece:
    """A part of a unit that lies in one shard, and is of one parameter, or of none: the padding at the end."""

    name: str | None
    offset: int
    """Where in the parameter it begins."""
    length: int
    """Its values; a parameter's last piece is padded to a multiple of ALIGNMENT."""
    shard: int
    start: int
    """Where in the shard it begins, a multiple of ALIGNMENT."""


def pieces_of(unit: FlatUnit, shards: int) -> list[Piece]:
    """Return the pieces of a unit of kind "values", cut into as many shards, in their order."""
    size = unit.numel // shards
    last = unit.entries[-1]
    end = -(-last.stop // ALIGNMENT) * ALIGNMENT
    rest = Entry("", torch.Size([unit.numel - end]), end)
    pieces = []
    for entry in (*unit.entries, rest):
        at = entry.start
        while at < entry.stop:
            stop = min(entry.stop, (at // size + 1) * size)
            pieces.append(Piece(entry.name or None, at - entry.start, stop - at, at // size, at % size))
            at = stop
    return pieces
