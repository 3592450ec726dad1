"""Collectives that count the bytes they send.

Only what HCCL, NCCL and Gloo all offer: all_reduce, reduce_scatter_tensor, all_gather_into_tensor and all_to_all_single
with even parts, sums alone. Bytes are those that one rank sends by the bandwidth-optimal algorithm: 2 (N-1)/N of the
payload for an all_reduce, (N-1)/N for the others.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_aigc.gradient_sync.transport.chunked_exchange import ChunkedExchanges
from lightning_aigc.sharding.gloo_reduce_scatter import SummedParts

KINDS = ("values", "index", "protected", "small", "intra_node")
"""Kinds of counted bytes: compressed values, data for the selection of indices, protected parameters, small parameters,
and traffic inside a node."""


RECENT = 6
"""Number of last collectives that are kept, for a report of a stall."""


@dataclass
class Traffic:
    """Bytes that this rank has sent, by kind, and its last collectives."""

    sent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    started: int = 0
    """Collectives so far. All ranks start the same ones, in the same order."""
    recent: deque[tuple[int, str, str, int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Number, collective, kind, bytes and time of the last ones."""

    def total(self) -> float:
        return sum(self.sent.values())

    def note(self, collective: str, kind: str, nbytes: int) -> None:
        self.started += 1
        self.recent.append((self.started, collective, kind, nbytes, time.monotonic()))

    def describe_recent(self) -> list[str]:
        """Return a line on each of this rank's last collectives; ranks whose lines differ are out of step."""
        now = time.monotonic()
        return [
            f"collective {number}: {collective} of {kind}, {nbytes} bytes, started {now - at:.1f} s ago"
            for number, collective, kind, nbytes, at in list(self.recent)
        ]


# Their names until torch 2.12, whose successors still have them and warn.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CountedGroup:
    """Process group that starts collectives without waiting, and counts their bytes."""

    chunked: ChunkedExchanges | None = None
    """Exchanges of large rows in chunks, where these are faster."""

    def __init__(self, group: Any, traffic: Traffic, *, inside_node: bool = False) -> None:
        self.group, self.traffic, self.inside_node = group, traffic, inside_node
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        self._is_gloo = dist.get_backend(group) == "gloo"

    def all_reduce(self, tensor: Tensor, kind: str = "values") -> Any:
        self._count("all_reduce", 2 * tensor.nbytes, kind)
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Any:
        self._count("reduce_scatter", tensor.nbytes, kind)
        if self._is_gloo:
            return SummedParts(out, tensor.view(self.size, -1), self.group)
        return reduce_scatter(out, tensor, group=self.group, async_op=True)

    def all_gather(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Any:
        self._count("all_gather", out.nbytes, kind)
        if self.chunked is not None and self.chunked.takes(tensor):
            return self.chunked.all_gather(out, tensor)
        return all_gather(out, tensor, group=self.group, async_op=True)

    def all_to_all(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Any:
        self._count("all_to_all", tensor.nbytes, kind)
        if self.chunked is not None and self.chunked.takes(self.shard(tensor)):
            return self.chunked.all_to_all(out, tensor)
        return dist.all_to_all_single(out, tensor, group=self.group, async_op=True)

    def shard(self, tensor: Tensor, rank: int | None = None) -> Tensor:
        """Return the shard of a flat tensor that belongs to a rank of this group, this rank's by default."""
        length = tensor.numel() // self.size
        at = self.rank if rank is None else rank
        return tensor[at * length : (at + 1) * length]

    def _count(self, collective: str, nbytes: int, kind: str) -> None:
        kind = "intra_node" if self.inside_node else kind
        self.traffic.note(collective, kind, nbytes)
        self.traffic.sent[kind] += (self.size - 1) / self.size * nbytes


def dense_ring_bytes(numel: int, ranks: int) -> float:
    """Return the bytes that one rank sends to sum float32 gradients in a ring: the denominator of every ratio."""
    return 2 * (ranks - 1) / ranks * 4 * numel


def synchronize(device: torch.device) -> None:
    """Wait for all work of an accelerator; nothing on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
