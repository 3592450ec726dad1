"""Gradient sync of several ranks in one process, with the package's units and reductions and simulated collectives."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_aigc.gradient_sync.modes.make_reductions import make_reductions
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.transport.collectives import Traffic, dense_ring_bytes
from lightning_aigc.gradient_sync.units import FlatUnit, make_units

RANKS = 4


class VirtualGroup:
    """A rank's view of a process group; `run_together` performs the collectives that it requests."""

    def __init__(self, rank: int, traffic: Traffic) -> None:
        self.rank, self.size, self.traffic = rank, RANKS, traffic

    def shard(self, tensor: Tensor, rank: int | None = None) -> Tensor:
        return tensor.chunk(RANKS)[self.rank if rank is None else rank]

    def all_reduce(self, tensor: Tensor, kind: str = "values") -> Any:
        return self._count(2 * tensor.nbytes, kind, ("sum", tensor, tensor))

    def all_gather(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Any:
        return self._count(out.nbytes, kind, ("gather", out, tensor))

    def all_to_all(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Any:
        return self._count(tensor.nbytes, kind, ("exchange", out, tensor))

    def _count(self, nbytes: int, kind: str, work: Any) -> Any:
        self.traffic.sent[kind] += (RANKS - 1) / RANKS * nbytes
        return work


class VirtualGroups:
    """One rank's process groups, as far as `make_reductions` and LocalSGD read them."""

    inside = None
    world_size = RANKS

    def __init__(self, rank: int) -> None:
        self.rank, self.traffic = rank, Traffic()
        self.everyone = self.between = VirtualGroup(rank, self.traffic)


def run_together(work: list[Generator[Any, None, Any]]) -> list[Any]:
    """Run the same reduction on all ranks, collective by collective."""
    results: list[Any] = [None] * RANKS
    while True:
        started = []
        for rank, reducing in enumerate(work):
            try:
                started.append(next(reducing))
            except StopIteration as end:
                results[rank] = end.value
        if not started:
            return results
        kind, outs, tensors = started[0][0], [s[1] for s in started], [s[2] for s in started]
        if kind == "sum":
            total = sum(tensor.float() for tensor in tensors)
            for out in outs:
                out.copy_(total)
        elif kind == "gather":
            for out in outs:
                torch.cat(tensors, out=out)
        else:
            parts = [tensor.chunk(RANKS) for tensor in tensors]
            for rank, out in enumerate(outs):
                out.copy_(torch.cat([part[rank] for part in parts]))


class VirtualSync:
    """One step of GradientSync for all ranks at once."""

    def __init__(self, model: nn.Module, options: SyncOptions) -> None:
        self.options, self.step = options, 0
        named = list(model.named_parameters())
        self.units: list[FlatUnit] = make_units(named, options, RANKS)
        groups = [VirtualGroups(rank) for rank in range(RANKS)]
        self.traffic, self.groups = groups[0].traffic, [of_rank.everyone for of_rank in groups]
        cpu = torch.device("cpu")
        self.reductions = [make_reductions(options, self.units, of_rank, cpu) for of_rank in groups]  # type: ignore[arg-type]
        self.residuals = [{unit.index: torch.zeros(unit.numel) for unit in self.units} for _ in range(RANKS)]
        self.numel = sum(p.numel() for _, p in named)

    def mean(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of gradients [ranks, ...] that every rank receives."""
        first = 1 if self.options.mode.startswith("sparse") or self.options.mode == "two_four" else 0
        compressing = self.step >= max(self.options.warmup_steps, first)
        means = {}
        for unit in self.units:
            shares = []
            for rank in range(RANKS):
                flat = self.residuals[rank][unit.index] * self.options.error_feedback
                for entry in unit.entries:
                    flat[entry.start : entry.stop] += gradients[entry.name][rank].reshape(-1) / RANKS
                shares.append(flat)
            uncompressed = unit.uncompressed or not compressing
            kind = "protected" if uncompressed else unit.kind
            reductions = [of_rank[kind] for of_rank in self.reductions]
            ranks = zip(reductions, shares, self.groups, strict=True)
            work = [reduction.reduce(unit, share, group) for reduction, share, group in ranks]  # type: ignore[arg-type]
            totals = run_together(work)
            for rank in range(RANKS):
                self.residuals[rank][unit.index] = shares[rank]
                if uncompressed:
                    self.reductions[rank][unit.kind].observe(unit, totals[rank][0])
            total = totals[0][0]
            assert all(torch.equal(total, other) for other, _ in totals), "ranks differ"
            for entry in unit.entries:
                means[entry.name] = total[entry.start : entry.stop].view(entry.shape)
        for of_rank in self.reductions:
            of_rank["values"].commit()
        self.step += 1
        return means

    def ratio(self) -> float:
        """Return the bytes sent over those of a dense float32 ring."""
        return self.traffic.total() / self.step / dense_ring_bytes(self.numel, RANKS)
