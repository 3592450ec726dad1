"""BucketBatchSampler: batches of one bucket each, in an order fixed by (seed, epoch), sharded over ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DistributedSampler


class BatchPlan(NamedTuple):
    """The samples of one batch, the user's first; `draws` seed their random choices within the epoch."""

    epoch: int
    samples: tuple[int, ...]
    draws: tuple[int, ...]
    user_count: int


class ResumableSampler(DistributedSampler[Any]):
    """A sampler of batches that resumes at any of them.

    It is a DistributedSampler because Lightning replaces any other sampler, and calls `set_epoch` on
    `DataLoader.sampler` only.
    """

    _start = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; a position loaded for another epoch is dropped."""
        if epoch != self.epoch:
            self._start = 0
        self.epoch = epoch

    @property
    def start(self) -> int:
        """The first batch of the next iteration."""
        return self._start

    def state_dict(self, position: int | None = None) -> dict[str, int]:
        """The position in the data: `position` batches of this epoch were delivered, by default the loaded position."""
        return {"epoch": self.epoch, "position": self._start if position is None else position, "batches": len(self)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the last delivered batch; after an epoch's last batch, with the next epoch."""
        finished = state["position"] >= len(self)
        self.epoch = state["epoch"] + int(finished)
        self._start = 0 if finished else state["position"]


class BucketBatchSampler(ResumableSampler):
    """Yields BatchPlans for DataLoader(batch_size=None, sampler=...).

    It is a DistributedSampler because Lightning replaces any other sampler, and calls `set_epoch` on
    `DataLoader.sampler` only. Every rank gets the same number of batches, and the same bucket at the same step. The
    last batch of a bucket may be short; with several ranks, samples repeat until all ranks have equally many.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        class_buckets: Sequence[Sequence[int]],
        batch_size: int,
        prior_ratio: float = 1.0,
        seed: int = 42,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Args:
        buckets: The samples of each bucket, one entry per repeat.
        class_buckets: The class samples of each bucket; all empty without prior preservation.
        """
        super().__init__(range(sum(map(len, buckets))), num_replicas=world_size, rank=rank, seed=seed)  # type: ignore[arg-type]
        self.buckets = buckets
        self.class_buckets = class_buckets
        self.batch_size = batch_size
        self.prior_ratio = prior_ratio
        self._start = 0
        self._plans: tuple[int, list[BatchPlan]] | None = None

    def __len__(self) -> int:
        together = self.batch_size * self.num_replicas
        return sum(-(-len(bucket) // together) for bucket in self.buckets)

    def __iter__(self) -> Iterator[BatchPlan]:
        start, self._start = self._start, 0
        yield from self.plans(self.epoch)[start:]

    def plans(self, epoch: int) -> list[BatchPlan]:
        """All batches of this rank in one epoch."""
        if self._plans is None or self._plans[0] != epoch:
            self._plans = (epoch, self._plan_epoch(epoch))
        return self._plans[1]

    def _plan_epoch(self, epoch: int) -> list[BatchPlan]:
        steps: list[BatchPlan] = []
        world = self.num_replicas
        first_draw = 0
        class_draw = -1  # class pictures count downwards, so that every draw in an epoch is unique
        for number, bucket in enumerate(self.buckets):
            order = list(range(len(bucket)))
            random.Random(f"{self.seed}|{epoch}|{number}").shuffle(order)
            if world > 1 and order:
                order += [order[place % len(order)] for place in range(-len(order) % world)]
            class_order = self._class_order(number, epoch, self._class_count_of_epoch(len(order)))
            for at in range(0, len(order), self.batch_size * world):
                together = order[at : at + self.batch_size * world]
                for rank in range(world):
                    mine = together[rank::world]
                    class_samples = [next(class_order) for _ in range(self._class_count(len(mine)))]
                    if rank == self.rank:
                        samples = (*(bucket[place] for place in mine), *class_samples)
                        draws = (
                            *(first_draw + place for place in mine),
                            *range(class_draw, class_draw - len(class_samples), -1),
                        )
                        steps.append(BatchPlan(epoch, samples, draws, len(mine)))
                    class_draw -= len(class_samples)
            first_draw += len(bucket)
        random.Random(f"{self.seed}|{epoch}|steps").shuffle(steps)
        return steps

    def _class_count(self, user_count: int) -> int:
        if not any(self.class_buckets):
            return 0
        return max(1, round(self.prior_ratio * user_count))

    def _class_count_of_epoch(self, items: int) -> int:
        counts, world = 0, self.num_replicas
        for at in range(0, items, self.batch_size * world):
            counts += world * self._class_count(min(self.batch_size, (items - at) // world))
        return counts

    def _class_order(self, number: int, epoch: int, per_epoch: int) -> Iterator[int]:
        """Yield class samples endlessly, each once before any repeats, continuing where the last epoch stopped."""
        samples = self.class_buckets[number]
        if not samples:
            return
        at = epoch * per_epoch
        while True:
            turn, place = divmod(at, len(samples))
            order = list(samples)
            random.Random(f"{self.seed}|class|{number}|{turn}").shuffle(order)
            yield from order[place:]
            at += len(samples) - place
