"""Collectives that count the bytes they send.

Only what HCCL, NCCL and Gloo all offer: all_reduce, reduce_scatter_tensor, all_gather_into_tensor and all_to_all_single
with even parts, sums alone. Bytes are those that one rank sends by the bandwidth-optimal algorithm: 2 (N-1)/N of the
payload for an all_reduce, (N-1)/N for the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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


class Traffic:
    """Bytes that this rank has sent, by kind, and its last collectives. Several threads may add to it."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._recent: deque[_Noted] = deque(maxlen=RECENT)
        self._started: dict[int, int] = {}
        self._lock = threading.Lock()

    def total(self) -> float:
        return sum(self.sent.values())

    def note(self, collective: str, kind: str, sent: float, nbytes: int, lane: int = 0) -> None:
        """Count a collective. All ranks start the same ones on a lane, in the same order.

        Args: sent: bytes that this rank sends. nbytes: bytes of the whole collective, for a report of a stall.
        """
        with self._lock:
            self.sent[kind] += sent
            number = self._started[lane] = self._started.get(lane, 0) + 1
            self._recent.append(_Noted(lane, number, f"{collective} of {kind}, {nbytes} bytes", time.monotonic()))

    def describe_recent(self) -> list[str]:
        """Return a line on each of this rank's last collectives; ranks whose lines differ are out of step."""
        now = time.monotonic()
        with self._lock:
            recent = list(self._recent)
        return [
            f"collective {noted.number} of hop {noted.lane + 1}: {noted.text}, started {now - noted.at:.1f} s ago"
            for noted in recent
        ]


@dataclass(frozen=True)
class _Noted:
    lane: int
    number: int
    text: str
    at: float


# Their names until torch 2.12, whose successors still have them and warn.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collective:
    """Collective that is ready to start, on any lane of its group."""

    def __init__(self, start: Callable[[int], Any]) -> None:
        self._start = start

    def start(self, lane: int = 0) -> Any:
        """Start it on this lane. Returns: what `wait` is called on."""
        return self._start(lane)

    def wait(self) -> None:
        """Start it on the first lane, and wait for its end."""
        self.start().wait()


class CountedGroup:
    """Process group that prepares collectives, and counts their bytes when they start.

    It may have several lanes: groups of the same ranks, of which each has an order of its own. Collectives of one lane
    start in the same order on every rank; those of different lanes in any order.
    """

    def __init__(self, group: Any, traffic: Traffic, *, inside_node: bool = False) -> None:
        self.group, self.traffic, self.inside_node = group, traffic, inside_node
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        self._lanes = [group]
        self.chunked: list[ChunkedExchanges] = []
        """Exchanges of large rows in chunks, one for each lane, where these are faster."""
        self._is_gloo = dist.get_backend(group) == "gloo"

    def add_lane(self, group: Any) -> None:
        """Add a group of the same ranks, in the same order."""
        self._lanes.append(group)
        if self.chunked:
            self.chunked.append(ChunkedExchanges(group))

    def all_reduce(self, tensor: Tensor, kind: str = "values") -> Collective:
        def start(lane: int) -> Any:
            self._count("all_reduce", 2 * tensor.nbytes, kind, lane)
            return dist.all_reduce(tensor, group=self._lanes[lane], async_op=True)

        return Collective(start)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Collective:
        def start(lane: int) -> Any:
            self._count("reduce_scatter", tensor.nbytes, kind, lane)
            if self._is_gloo:
                return SummedParts(out, tensor.view(self.size, -1), self._lanes[lane])
            return reduce_scatter(out, tensor, group=self._lanes[lane], async_op=True)

        return Collective(start)

    def all_gather(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Collective:
        def start(lane: int) -> Any:
            self._count("all_gather", out.nbytes, kind, lane)
            if self.chunked and self.chunked[lane].takes(tensor):
                return self.chunked[lane].all_gather(out, tensor)
            return all_gather(out, tensor, group=self._lanes[lane], async_op=True)

        return Collective(start)

    def all_to_all(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Collective:
        def start(lane: int) -> Any:
            self._count("all_to_all", tensor.nbytes, kind, lane)
            if self.chunked and self.chunked[lane].takes(self.shard(tensor)):
                return self.chunked[lane].all_to_all(out, tensor)
            return dist.all_to_all_single(out, tensor, group=self._lanes[lane], async_op=True)

        return Collective(start)

    def shard(self, tensor: Tensor, rank: int | None = None) -> Tensor:
        """Return the shard of a flat tensor that belongs to a rank of this group, this rank's by default."""
        length = tensor.numel() // self.size
        at = self.rank if rank is None else rank
        return tensor[at * length : (at + 1) * length]

    def _count(self, collective: str, nbytes: int, kind: str, lane: int) -> None:
        kind = "intra_node" if self.inside_node else kind
        self.traffic.note(collective, kind, (self.size - 1) / self.size * nbytes, nbytes, lane)


def dense_ring_bytes(numel: int, ranks: int) -> float:
    """Return the bytes that one rank sends to sum float32 gradients in a ring: the denominator of every ratio."""
    return 2 * (ranks - 1) / ranks * 4 * numel


def synchronize(device: torch.device) -> None:
    """Wait for all work of an accelerator; nothing on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
