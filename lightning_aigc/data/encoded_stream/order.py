"""StreamSampler: batches of one bucket each from shards, in an order fixed by (seed, epoch), sharded over ranks.

An epoch permutes each bucket's shards and lays their entries end to end; every rank gets an equal run of them, so it
reads few shards that others read. Within windows of a rank's run the entries are permuted. Nothing is listed by entry:
the order of a million takes two bytes a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_aigc.data.loader.sampler import ResumableSampler


class StreamPlan(NamedTuple):
    """The entries of one batch, as shards of a bucket and places in them."""

    epoch: int
    bucket: int
    shards: tuple[int, ...]
    places: tuple[int, ...]
    is_first: tuple[bool, ...]
    """Whether an entry is not a repeat that fills up a rank's run."""


class StreamSampler(ResumableSampler):
    """Yields StreamPlans for DataLoader(batch_size=None, sampler=...), and resumes at any batch.

    Every rank gets the same number of batches, and the same bucket at the same step; with several ranks, entries repeat
    until all have equally many.

    Args:
        counts: entries of each shard, by bucket.
        window: entries within which a rank's run is permuted.
    """

    def __init__(
        self,
        counts: Sequence[Sequence[int]],
        batch_size: int,
        window: int = 8192,
        seed: int = 42,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
    ) -> None:
        total = int(sum(map(sum, counts)))
        super().__init__(range(total), num_replicas=world_size, rank=rank, seed=seed, shuffle=shuffle)  # type: ignore[arg-type]
        self.counts = [np.asarray(of_bucket, dtype=np.int64) for of_bucket in counts]
        self.batch_size, self.window = batch_size, window
        self.runs = [int(-(-of_bucket.sum() // world_size)) for of_bucket in self.counts]
        """Entries of a rank, by bucket."""

    def __len__(self) -> int:
        return sum(-(-run // self.batch_size) for run in self.runs)

    def __iter__(self) -> Iterator[StreamPlan]:
        start, self._start = self._start, 0
        order = self._bucket_order()
        done = np.bincount(order[:start], minlength=len(self.counts))
        readers = [self._entries(bucket, int(done[bucket]) * self.batch_size) for bucket in range(len(self.counts))]
        for bucket in order[start:]:
            left = self.runs[bucket] - int(done[bucket]) * self.batch_size
            chosen = [next(readers[bucket]) for _ in range(min(self.batch_size, left))]
            done[bucket] += 1
            yield StreamPlan(self.epoch, int(bucket), *zip(*chosen, strict=True))

    def _bucket_order(self) -> NDArray[np.uint16]:
        batches = [-(-run // self.batch_size) for run in self.runs]
        order = np.repeat(np.arange(len(batches), dtype=np.uint16), batches)
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch, 1]).shuffle(order)
        return order

    def _entries(self, bucket: int, start: int) -> Iterator[tuple[int, int, bool]]:
        """(shard, place, is_first) of this rank's entries of a bucket, from the `start`th on."""
        counts = self.counts[bucket]
        shards = np.arange(len(counts))
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch, 2, bucket]).shuffle(shards)
        ends = np.cumsum(counts[shards])
        run = self.runs[bucket]
        for window in range(start // self.window, -(-run // self.window)):
            places = np.arange(window * self.window, min(run, (window + 1) * self.window))
            if self.shuffle:
                np.random.default_rng([self.seed, self.epoch, 3, bucket, self.rank, window]).shuffle(places)
            places = places[max(0, start - window * self.window) :] + self.rank * run
            is_first = places < ends[-1]
            places %= ends[-1]
            at = np.searchsorted(ends, places, side="right")
            inside = places - (ends[at] - counts[shards[at]])
            yield from zip(shards[at].tolist(), inside.tolist(), is_first.tolist(), strict=True)
