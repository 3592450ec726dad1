"""Mode low_rank: PowerSGD, which sends each matrix as two thin factors.

torch has PowerSGD as a DDP hook. It keys residuals by bucket, so a rebuilt bucket takes another's; one Inf stays in
them for good; it knows no protected layers; and over Gloo it aborts with two buckets (torch 2.13). Not so here.

Source: Vogels et al., PowerSGD, arXiv:1905.13727, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.gradient_sync.collectives import CountedGroup
from lightning_aigc.gradient_sync.flat_units import Entry, FlatUnit
from lightning_aigc.gradient_sync.reductions import Reducing
from lightning_aigc.host_state import to_cpu

INT8_RATIO = (8 + 16 / 32) / 32
"""Bytes of mode int8 over float32's, its scales included."""


class PowerSGD:
    """Approximates gradients at rank `rank`, by one power iteration a step that starts where the last one ended."""

    def __init__(self, units: Sequence[FlatUnit], rank: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the same columns on every rank
        self._columns = {
            entry.name: torch.randn(columns, min(rank, rows, columns), generator=generator).to(device)
            for unit in units
            for entry in unit.entries
            for rows, columns in [matrix_shape(entry)]
        }
        self._next: dict[str, Tensor] = {}

    def reduce(self, unit: FlatUnit, e_N: Tensor, group: CountedGroup) -> Reducing:
        matrices = [e_N[entry.start : entry.stop].view(matrix_shape(entry)) for entry in unit.entries]
        left = [matrix @ self._columns[entry.name] for entry, matrix in zip(unit.entries, matrices, strict=True)]
        packed = torch.cat([p.reshape(-1) for p in left])
        yield group.all_reduce(packed)
        # The host does not look at the numbers, because it would have to wait for them. Some devices raise an error
        # for a basis of values that are not finite, so QR is given zeros then, and the sum is made NaN in the end.
        finite = torch.isfinite(packed).all()
        bases = [torch.linalg.qr(p).Q for p in _unpack(torch.where(finite, packed, 0.0), left)]

        right = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        for matrix, basis, columns in zip(matrices, bases, right, strict=True):
            matrix.addmm_(basis, columns.T, alpha=-1)
        packed = torch.cat([q.reshape(-1) for q in right])
        yield group.all_reduce(packed)
        packed = torch.where(finite, packed, torch.nan)
        total_N = torch.zeros_like(e_N)
        for entry, basis, columns in zip(unit.entries, bases, _unpack(packed, right), strict=True):
            torch.mm(basis, columns.T, out=total_N[entry.start : entry.stop].view(matrix_shape(entry)))
            self._next[entry.name] = columns.clone()
        return total_N, packed.sum()

    def observe(self, unit: FlatUnit, total_N: Tensor) -> None:
        pass

    def commit(self) -> None:
        for name, columns in self._next.items():  # without a gradient they are zeros, and would stay zeros
            self._columns[name] = torch.where(columns.any(), columns, self._columns[name])
        self.rollback()

    def rollback(self) -> None:
        self._next = {}

    def state_dict(self) -> dict[str, Any]:
        return {"columns": to_cpu(self._columns, clone=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, columns in self._columns.items():
            saved = state["columns"].get(name)
            if saved is not None and saved.shape == columns.shape:
                self._columns[name] = saved.to(columns.device)


def advice(units: Iterable[FlatUnit], rank: int) -> str:
    """Return a clause for matrices whose factors take more bytes than eight-bit values would; else nothing."""
    matrices = [matrix_shape(entry) for unit in units if unit.kind == "values" for entry in unit.entries]
    factors = sum(min(rank, *matrix) * sum(matrix) for matrix in matrices)
    ratio = factors / max(1, sum(math.prod(matrix) for matrix in matrices))
    if ratio <= INT8_RATIO:
        return ""
    return (
        f", whose factors of rank {rank} take {ratio:.2f} of dense's bytes here, where int8 takes {INT8_RATIO:.2f} and "
        "loses nothing: choose int8, or a lower rank"
    )


def matrix_shape(entry: Entry) -> tuple[int, int]:
    """Return a weight's shape as a matrix: its first dimension by all others."""
    return entry.shape[0], entry.shape[1:].numel()


def _unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(packed, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
