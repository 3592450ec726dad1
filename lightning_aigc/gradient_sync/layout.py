"""Which gradients travel together: units of parameters, fixed by name.

A unit is one flat float32 vector. Units follow the parameters' reversed order, in which their gradients roughly arrive,
and never DDP's buckets: those change after the first step, and a residual must stay where it is. Protected and small
parameters have units of their own, sent whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.options import SyncOptions

ALIGNMENT = 256
"""A compressed parameter starts at a multiple of this, so that no block has values of two parameters."""
SMALL = 1024
"""A parameter with fewer values, or with one dimension, is sent whole: it costs nothing and often matters most."""


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
class Unit:
    """Parameters whose gradients travel together."""

    index: int
    whole: bool
    """Sent dense and in float32, whatever the mode."""
    protected: bool
    """Whole because a pattern says so."""
    entries: tuple[Entry, ...]
    numel: int
    """Length of the flat vector, its padding included."""


def make_units(
    parameters: Iterable[tuple[str, torch.Tensor]], options: SyncOptions, ranks: int = 1, ranks_inside: int = 1
) -> list[Unit]:
    """The units of these parameters, for so many ranks, of which `ranks_inside` add up among themselves first.

    A compressed unit's length divides by ALIGNMENT * ranks, a whole one's by `ranks_inside`: padding travels too.
    Raises: ConfigError for a pattern in `protect` that the user gave and that covers none of them.
    """
    named = list(parameters)
    protection = options.protection()
    check_protect(options, [name for name, _ in named])
    limit = options.bucket_mb * 1e6 / 4
    units: list[Unit] = []
    open_units: dict[tuple[bool, bool, torch.dtype], list[tuple[str, torch.Tensor]]] = {}

    def close(kind: tuple[bool, bool, torch.dtype]) -> None:
        members = open_units.pop(kind)
        whole, protected, _ = kind
        alignment, divisor = (1, ranks_inside) if whole else (ALIGNMENT, ALIGNMENT * ranks)
        entries, start = [], 0
        for name, parameter in members:
            entries.append(Entry(name, parameter.shape, start))
            start += _padded(parameter.numel(), alignment)
        units.append(Unit(len(units), whole, protected, tuple(entries), _padded(max(start, 1), divisor)))

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


def entry_of_each_block(unit: Unit) -> torch.Tensor:
    """The place in `entries` of each block of ALIGNMENT values of a compressed unit; padding joins the last."""
    starts = torch.tensor([entry.start // ALIGNMENT for entry in unit.entries[1:]], dtype=torch.int64)
    return torch.bucketize(torch.arange(unit.numel // ALIGNMENT), starts, right=True)


def is_small(parameter: torch.Tensor) -> bool:
    return parameter.dim() < 2 or parameter.numel() < SMALL


def check_protect(options: SyncOptions, names: Sequence[str]) -> None:
    """Raises: ConfigError for a pattern that the user gave and that covers none of these parameters."""
    if options.protect is None:
        return
    try:
        options.protection().check(names)
    except ValueError as error:
        raise ConfigError(f"{error}; leave protect out for the default, or give [] to protect nothing") from None


def _padded(length: int, divisor: int) -> int:
    return -(-length // divisor) * divisor
