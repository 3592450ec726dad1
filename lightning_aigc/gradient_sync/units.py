"""Flat units: groups of parameters whose gradients are reduced together, fixed by name.

A unit is one flat float32 vector. Units follow the parameters' reversed order, in which backward roughly computes their
gradients, and never DDP's buckets: buckets change after the first step, and residuals need a fixed place. Protected
parameters have their own units, sent uncompressed; small ones have their own units, sent in eight bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_aigc.gradient_sync.options import SyncOptions, check_protect
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups
from lightning_aigc_kernels.quantize_blocks import BLOCK

ALIGNMENT = 256
"""Block size of the modes; the length of every compressed shard is a multiple of it."""
SMALL = 1024
"""Parameters with fewer values, or with one dimension, are sent in eight bits: they cost little and often matter."""
Kind = Literal["values", "small", "protected"]
"""Kind of a unit's parameters; it decides the reduction, and bytes are counted under the same names."""

START: dict[Kind, int] = {"values": ALIGNMENT, "small": BLOCK, "protected": 1}
"""Alignment of a parameter's start, by kind."""


@dataclass(frozen=True)
class Entry:
    """Place of one parameter in its unit."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


@dataclass(frozen=True)
class FlatUnit:
    """Parameters whose gradients are reduced as one flat vector."""

    index: int
    kind: Kind
    entries: tuple[Entry, ...]
    numel: int
    """Length of the flat vector with its padding."""

    @property
    def uncompressed(self) -> bool:
        """Whether it is sent dense in float32 in every mode."""
        return self.kind == "protected"

    @property
    def alignment(self) -> int:
        """Alignment of its parameters, so that no block has values of two of them."""
        return START[self.kind]

    def describe(self) -> str:
        """Return a phrase that names the unit by its first parameter."""
        return f"unit {self.index} ({self.kind}), {self.numel} values from {self.entries[0].name}"


def make_units(
    parameters: Iterable[tuple[str, torch.Tensor]], options: SyncOptions, ranks: int = 1, ranks_inside: int = 1
) -> list[FlatUnit]:
    """Divide parameters into units, for `ranks` ranks of which `ranks_inside` reduce among themselves first.

    A compressed unit's length is a multiple of ALIGNMENT * ranks, an uncompressed unit's a multiple of `ranks_inside`;
    padding is sent too. A small parameter starts at a multiple of the quantizer's BLOCK.

    Raises: ConfigError for a pattern in the user's `protect` that covers none of them.
    """
    named = list(parameters)
    protection = options.protection([name for name, _ in named])
    check_protect(options, [name for name, _ in named])
    limit = options.bucket_mb * 1e6 / 4
    units: list[FlatUnit] = []
    open_units: dict[tuple[Kind, torch.dtype], list[tuple[str, torch.Tensor]]] = {}

    def close(key: tuple[Kind, torch.dtype]) -> None:
        members, kind = open_units.pop(key), key[0]
        divisor = ranks_inside if kind == "protected" else ALIGNMENT * ranks
        units.append(FlatUnit(len(units), kind, *_lay_out(members, START[kind], divisor)))

    for name, parameter in reversed(named):
        kind: Kind = "protected" if protection.covers(name) else "small" if is_small(parameter) else "values"
        members = open_units.setdefault((kind, parameter.dtype), [])
        members.append((name, parameter))
        if sum(p.numel() for _, p in members) >= limit:
            close((kind, parameter.dtype))
    for key in list(open_units):
        close(key)
    return units


def one_unit(
    parameters: Sequence[tuple[str, torch.Tensor]], ranks: int, alignment: int = BLOCK, shard: int = ALIGNMENT
) -> FlatUnit:
    """Return one unit of all these parameters in their order, of any kind; the default length is for few-bit integers.

    Args:
        alignment: A parameter starts at a multiple of it.
        shard: A rank's part of the unit is a multiple of it.
    """
    return FlatUnit(0, "values", *_lay_out(parameters, alignment, shard * ranks))


def entry_of_each_block(unit: FlatUnit) -> torch.Tensor:
    """Return the index in `entries` of each block of `alignment` values of a unit; padding belongs to the last."""
    starts = torch.tensor([entry.start // unit.alignment for entry in unit.entries[1:]], dtype=torch.int64)
    return torch.bucketize(torch.arange(unit.numel // unit.alignment), starts, right=True)


def own_shard(unit: FlatUnit, groups: ProcessGroups) -> tuple[int, int]:
    """Return start and length of the part of a unit that this rank compresses: all of it in a flat sync."""
    if groups.inside is None:
        return 0, unit.numel
    length = unit.numel // groups.inside.size
    return groups.inside.rank * length, length


def view_of(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return a view of a parameter's part of the flat vector, in the parameter's shape."""
    return flat[entry.start : entry.stop].view(entry.shape)


def is_small(parameter: torch.Tensor) -> bool:
    return parameter.dim() < 2 or parameter.numel() < SMALL


def _lay_out(
    members: Iterable[tuple[str, torch.Tensor]], alignment: int, divisor: int
) -> tuple[tuple[Entry, ...], int]:
    """Return consecutive entries, each aligned to `alignment`, and a length that is a multiple of `divisor`."""
    entries, start = [], 0
    for name, parameter in members:
        entries.append(Entry(name, parameter.shape, start))
        start += _padded(parameter.numel(), alignment)
    return tuple(entries), _padded(max(start, 1), divisor)


def _padded(length: int, divisor: int) -> int:
    return -(-length // divisor) * divisor
