"""all_to_all and all_gather over Gloo in chunks, for slow links where large messages in both directions collide.

Gloo writes each message at once. Where two messages of some megabytes cross on a slow link, acknowledgements wait
behind data, and each direction gets about half of the link; chunks of a quarter megabyte, a few at a time, get all of
it. On a fast link the host's work for each chunk costs more (benchmarks/studies/gloo_pieces.py). NCCL and HCCL split
messages themselves.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES, IN_FLIGHT = 256 * 1024, 4
"""Bytes of a chunk, and chunks in flight per direction."""
UNSPLIT_BYTES = 512 * 1024
"""Largest row that is not split."""
SLOW_BPS = 100e6
"""Bytes a second of a link below which chunks are worth it: at 1 Gbit/s their work takes more from backward."""
PROBES = 3
"""Measurements of a link; the best one counts."""
TAG = 7


class Exchange:
    """Exchange of rows with the other ranks of a group."""

    def __init__(self, group: Any, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        self._group, self._sent, self._received = group, sent, received
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Wait for the end. Raises: RuntimeError from Gloo, if a rank has died or the group's timeout has passed."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Send and receive all chunks; an error is kept for `wait`."""
        in_flight: deque[tuple[Any, Any]] = deque()
        try:
            for pair in self._started_chunks():
                in_flight.append(pair)
                if len(in_flight) == IN_FLIGHT:
                    _wait_for(in_flight.popleft())
            while in_flight:
                _wait_for(in_flight.popleft())
        except BaseException as error:
            self._error = error
        self._is_done.set()

    def _started_chunks(self) -> Iterator[tuple[Any, Any]]:
        """Start the chunks in order, each together with one from another rank."""
        rank, size = dist.get_rank(self._group), len(self._sent)
        for step in range(1, size):
            to, origin = (rank + step) % size, (rank - step) % size
            for outgoing, incoming in zip(_chunks(self._sent[to]), _chunks(self._received[origin]), strict=True):
                yield (
                    dist.isend(outgoing, group=self._group, group_dst=to, tag=TAG),
                    dist.irecv(incoming, group=self._group, group_src=origin, tag=TAG),
                )


class ChunkedExchanges:
    """Thread that runs a Gloo group's exchanges in the order in which they were started."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank: int = dist.get_rank(group)
        self._size: int = dist.get_world_size(group)
        self._started: queue.Queue[Exchange | None] = queue.Queue()
        threading.Thread(target=self._serve, name="chunked-exchange", daemon=True).start()

    def takes(self, row: Tensor) -> bool:
        """Whether rows as large as this one are split."""
        return row.nbytes > UNSPLIT_BYTES

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Exchange:
        """Equivalent of dist.all_to_all_single with even parts."""
        return self._start(tensor.chunk(self._size), out.chunk(self._size))

    def all_gather(self, out: Tensor, tensor: Tensor) -> Exchange:
        """Equivalent of dist.all_gather_into_tensor."""
        return self._start([tensor] * self._size, out.chunk(self._size))

    def close(self) -> None:
        """Accept no more exchanges; one that waits for a lost rank ends with the group's timeout."""
        self._started.put(None)

    def _start(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Exchange:
        received[self._rank].copy_(sent[self._rank])
        exchange = Exchange(self._group, sent, received)
        self._started.put(exchange)
        return exchange

    def _serve(self) -> None:
        while (exchange := self._started.get()) is not None:
            exchange.run()


def chunked_where_slow(group: Any) -> ChunkedExchanges | None:
    """Return exchanges in chunks for a Gloo group whose slowest link is slow, else None. Collective."""
    size = dist.get_world_size(group)
    if size == 1 or dist.get_backend(group) != "gloo":
        return None
    rows = torch.zeros(2, size, IN_FLIGHT * CHUNK_BYTES, dtype=torch.uint8)
    limit = (size - 1) * rows[0, 0].nbytes / SLOW_BPS
    best = math.inf
    for _ in range(PROBES):
        dist.barrier(group)
        start = time.perf_counter()
        exchange = Exchange(group, list(rows[0]), list(rows[1]))
        exchange.run()
        exchange.wait()
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)  # all ranks decide alike
        best = min(best, float(slowest))
        if best > 4 * limit:  # too slow for a moment of other load
            break
    return ChunkedExchanges(group) if best > limit else None


def _chunks(row: Tensor) -> tuple[Tensor, ...]:
    return torch.split(row, CHUNK_BYTES // row.element_size())


def _wait_for(pair: tuple[Any, Any]) -> None:
    for work in pair:
        work.wait()
