"""BucketBatchSampler: batches of one bucket each, in an order fixed by (seed, epoch), sharded over ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
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
        prior_ratio: Class samples for each user sample, over the training: a batch has what is due since the one before
            it, which is none in some batches of a small ratio.
        """
        super().__init__(range(sum(map(len, buckets))), num_replicas=world_size, rank=rank, seed=seed)  # type: ignore[arg-type]
        self.buckets = buckets
        self.class_buckets = class_buckets
        self.batch_size = batch_size
        self._ratio = Fraction(str(prior_ratio)) if any(class_buckets) else Fraction(0)
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
        class_draw = -1  # class images count downwards, so that every draw in an epoch is unique
        of_rank = [-(-len(bucket) // world) for bucket in self.buckets]
        ends = list(itertools.accumulate(of_rank))
        for number, bucket in enumerate(self.buckets):
            order = list(range(len(bucket)))
            random.Random(f"{self.seed}|{epoch}|{number}").shuffle(order)
            if world > 1 and order:
                order += [order[place % len(order)] for place in range(-len(order) % world)]
            seen = ends[number] - of_rank[number]
            class_order = self._class_order(number, world * self._drawn_before(epoch, seen, ends[number], ends[-1]))
            for at in range(0, len(order), self.batch_size * world):
                together = order[at : at + self.batch_size * world]
                users = len(together) // world
                class_count = self._due(epoch * ends[-1] + seen + users) - self._due(epoch * ends[-1] + seen)
                seen += users
                for rank in range(world):
                    mine = together[rank::world]
                    class_samples = list(itertools.islice(class_order, class_count))
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

    def _due(self, users: int) -> int:
        """Class samples that a rank has drawn with this number of user samples, since the training began."""
        return users * self._ratio.numerator // self._ratio.denominator

    def _drawn_before(self, epoch: int, start: int, end: int, per_epoch: int) -> int:
        """Class samples that a rank drew in earlier epochs between two positions of an epoch."""
        period = self._ratio.denominator  # what is due repeats after as many epochs at the latest
        whole, rest = divmod(epoch, period)
        counts = [
            self._due(before * per_epoch + end) - self._due(before * per_epoch + start)
            for before in range(period if whole else rest)
        ]
        return whole * sum(counts) + sum(counts[:rest])

    def _class_order(self, number: int, at: int) -> Iterator[int]:
        """Yield a bucket's class samples endlessly from the `at`th on, each once before any comes again."""
        samples = self.class_buckets[number]
        while samples:
            turn, place = divmod(at, len(samples))
            order = list(samples)
            random.Random(f"{self.seed}|class|{number}|{turn}").shuffle(order)
            yield from order[place:]
            at += len(samples) - place
