"""Flat units: groups of parameters whose gradients are reduced together, fixed by name.

A unit is one flat float32 vector. Units follow the parameters' reversed order, in which backward roughly computes their
gradients, and never DDP's buckets: those change after the first step, and a residual must stay where it is. Protected
and small parameters have separate units, sent uncompressed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lightning_aigc.gradient_sync.options import SyncOptions, check_protect

ALIGNMENT = 256
"""A compressed parameter starts at a multiple of this, so that no block has values of two parameters."""
SMALL = 1024
"""A parameter with fewer values, or with one dimension, is sent uncompressed: it costs little and often matters."""


@dataclass(frozen=True)
class Entry:
    """One parameter's place in its unit."""

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
    uncompressed: bool
    """Sent dense and in float32, whatever the mode."""
    protected: bool
    """Uncompressed because a pattern says so."""
    entries: tuple[Entry, ...]
    numel: int
    """Length of the flat vector, its padding included."""


def make_units(
    parameters: Iterable[tuple[str, torch.Tensor]], options: SyncOptions, ranks: int = 1, ranks_inside: int = 1
) -> list[FlatUnit]:
    """Cut these parameters into units, for `ranks` ranks of which `ranks_inside` reduce among themselves first.

    A compressed unit's length divides by ALIGNMENT * ranks, an uncompressed unit's by `ranks_inside`: padding is sent
    too.
    Raises: ConfigError for a pattern in `protect` that the user gave and that covers none of them.
    """
    named = list(parameters)
    protection = options.protection()
    check_protect(options, [name for name, _ in named])
    limit = options.bucket_mb * 1e6 / 4
    units: list[FlatUnit] = []
    open_units: dict[tuple[bool, bool, torch.dtype], list[tuple[str, torch.Tensor]]] = {}

    def close(kind: tuple[bool, bool, torch.dtype]) -> None:
        members = open_units.pop(kind)
        uncompressed, protected, _ = kind
        alignment, divisor = (1, ranks_inside) if uncompressed else (ALIGNMENT, ALIGNMENT * ranks)
        entries, start = [], 0
        for name, parameter in members:
            entries.append(Entry(name, parameter.shape, start))
            start += _padded(parameter.numel(), alignment)
        units.append(FlatUnit(len(units), uncompressed, protected, tuple(entries), _padded(max(start, 1), divisor)))

    for name, parameter in reversed(named):
        protected = protection.covers(name)
        kind = (protected or is_small(parameter), protected, parameter.dtype)
        members = open_units.setdefault(kind, [])
        members.append((name, parameter))
        if sum(p.numel() for _, p in members) >= limit:
            close(kind)
    for kind in list(open_units):
        close(kind)
    return units


def entry_of_each_block(unit: FlatUnit) -> torch.Tensor:
    """Return the place in `entries` of each block of ALIGNMENT values of a compressed unit; padding joins the last."""
    starts = torch.tensor([entry.start // ALIGNMENT for entry in unit.entries[1:]], dtype=torch.int64)
    return torch.bucketize(torch.arange(unit.numel // ALIGNMENT), starts, right=True)


def view_of(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return a parameter's part of its unit's flat vector, in the parameter's shape."""
    return flat[entry.start : entry.stop].view(entry.shape)


def is_small(parameter: torch.Tensor) -> bool:
    return parameter.dim() < 2 or parameter.numel() < SMALL


def _padded(length: int, divisor: int) -> int:
    return -(-length // divisor) * divisor
