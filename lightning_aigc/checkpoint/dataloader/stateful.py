"""Loaders that know their state in the middle of an epoch, and resume there.

| loader                                             | how it resumes                                                 |
|----------------------------------------------------|----------------------------------------------------------------|
| DataLoader over a map-style dataset                | replays the permutation; restores the workers' random states   |
| anything with state_dict and load_state_dict       | by these, which Lightning saves and loads                      |
| DataLoader over an IterableDataset, other iterable | reads the delivered batches again and drops them               |

No random number is drawn that the stock loader would not draw, so a run equals one without this, bit for bit. The
methods are not called state_dict and load_state_dict, because Lightning would then call them as well.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_aigc.checkpoint.dataloader.sampler import LoaderRNG, ReplayableSampler
from lightning_aigc.checkpoint.dataloader.worker import CollateWithRNG, WorkerInit

LoaderState = dict[str, Any]
"""Batches delivered, and the random states before the epoch's permutation and before its workers started."""


class EpochIterator:
    """One iteration over a loader; if a state is pending, `ResumableLoader.start_pending` starts it there."""

    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader
        self.delivered = 0
        self.inner = loader.stock_iterator() if loader.pending is None else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.inner is None:  # Lightning prefetches a batch before the random states are restored
            now = LoaderRNG.capture()
            self.loader.start_pending()
            now.restore()
            assert self.inner is not None
        batch = self.loader.receive(next(self.inner))
        self.delivered += 1
        return batch


class ResumableLoader:
    """Mixed into a DataLoader's class. This base reads delivered batches again; subclasses resume faster."""

    def init_state(self) -> None:
        self.pending: LoaderState | None = None
        self.epoch_rng: LoaderRNG | None = None
        self.generators = _generators_of(self)
        self._epoch: Callable[[], EpochIterator | None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        if self.pending is None:
            self.epoch_rng = LoaderRNG.capture(self.generators)
        epoch = EpochIterator(self)
        # Weak: in a reference cycle its workers would live until the collector runs, possibly in a worker.
        self._epoch = weakref.ref(epoch)
        return epoch

    def stock_iterator(self) -> Iterator[Any]:
        return iter(super().__iter__())  # type: ignore[misc]

    def receive(self, data: Any) -> Any:
        return data

    def snapshot_state(self, prefetched: int = 0) -> LoaderState:
        """The state of the running epoch, without the batches that were prefetched and not used."""
        epoch = self._epoch()
        delivered = epoch.delivered - prefetched if epoch is not None else 0
        return {
            "delivered": delivered,
            "epoch_rng": self.epoch_rng,
            "generators": LoaderRNG.capture(self.generators).generators,
        }

    def state_after(self, delivered: int) -> LoaderState:
        """The state after `batches` batches of a new epoch, for a run that cannot replay the old one."""
        now = LoaderRNG.capture(self.generators)
        return {"delivered": delivered, "epoch_rng": now, "generators": now.generators}

    def load_snapshot_state(self, state: LoaderState) -> None:
        """Start the next epoch iterator at this state."""
        self.pending = state

    def start_pending(self) -> None:
        """Start the running epoch iterator at the pending state; this changes the global random states."""
        (state, self.pending), epoch = (self.pending, None), self._epoch()
        if state is None or epoch is None:
            return
        self.epoch_rng = state["epoch_rng"]
        epoch.inner = self._iterator_at(state)
        epoch.delivered = state["delivered"]
        for generator, random_state in zip(self.generators, state["generators"], strict=True):
            generator.set_state(random_state)

    def _iterator_at(self, state: LoaderState) -> Iterator[Any]:
        if state["epoch_rng"] is not None:
            state["epoch_rng"].restore(self.generators)
        iterator = self.stock_iterator()
        for _ in range(state["delivered"]):
            next(iterator, None)
        return iterator


class RepeatedIterable(ResumableLoader):
    """Resumes any iterable that is no DataLoader."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source
        self.init_state()

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]  # raises TypeError for one that has none, as it should

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)

    def stock_iterator(self) -> Iterator[Any]:
        return iter(self.source)


class StatefulLoader(ResumableLoader):
    """A DataLoader with a state_dict, which Lightning has loaded by now."""

    def _iterator_at(self, state: LoaderState) -> Iterator[Any]:
        if state["epoch_rng"] is not None:
            state["epoch_rng"].restore(self.generators)
        iterator = self.stock_iterator()
        if not inspect.isgenerator(iterator):
            return iterator
        # Its workers start, and draw their seed, with the first batch, which must happen before the random states are
        # restored.
        first = list(_up_to_one(iterator))
        return chain(first, iterator)


def _up_to_one(iterator: Iterator[Any]) -> Iterator[Any]:
    for item in iterator:
        yield item
        return


class MapStyleLoader(ResumableLoader):
    """A DataLoader over a map-style dataset.

    Batch i comes from worker i % num_workers. It resumes at a multiple of num_workers, where each worker has the same
    number and random states as before, and drops the batches between there and the position.
    """

    num_workers: int
    persistent_workers: bool
    worker_init_fn: WorkerInit
    collate_fn: Any

    def init_state(self) -> None:
        super().init_state()
        self.recorded = ReplayableSampler(DataLoader._index_sampler.fget(self), self.generators)  # type: ignore[attr-defined]
        self.started: LoaderRNG | None = None
        self._states: list[bytes | None] = [None] * self.num_workers
        self._aligned: list[tuple[int, list[bytes | None]]] = []
        self._count = 0
        if self.num_workers:
            self.collate_fn = CollateWithRNG(self.collate_fn)

    @property
    def _index_sampler(self) -> Any:
        return self.__dict__["recorded"] if "recorded" in self.__dict__ else DataLoader._index_sampler.fget(self)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        if not self.persistent_workers:
            self._states = [None] * self.num_workers
        self._count, self._aligned = 0, [(0, list(self._states))]
        if self.pending is None and (self.started is None or not self.persistent_workers):
            self.started = LoaderRNG.capture(self.generators)
        return super().__iter__()

    def receive(self, data: Any) -> Any:
        if not self.num_workers:
            return data
        batch, self._states[self._count % self.num_workers] = data
        self._count += 1
        if self._count % self.num_workers == 0:
            self._aligned = [*self._aligned[-1:], (self._count, list(self._states))]
        return batch

    def snapshot_state(self, prefetched: int = 0) -> LoaderState:
        state = super().snapshot_state(prefetched)
        at, states = next((a for a in reversed(self._aligned) if a[0] <= state["delivered"]), (0, []))
        state |= {"started": self.started, "before": self.recorded.before, "at_first": self.recorded.at_first}
        return state | {"workers": self.num_workers, "aligned": at, "states": states}

    def state_after(self, delivered: int) -> LoaderState:
        state = super().state_after(delivered)
        return state | {
            "started": state["epoch_rng"],
            "before": state["epoch_rng"],
            "at_first": state["epoch_rng"],
            "workers": -1,
        }

    def _iterator_at(self, state: LoaderState) -> Iterator[Any]:
        start = state["delivered"]
        if self.num_workers and state["workers"] == self.num_workers:
            start, self._states = state["aligned"], list(state["states"])
        self._count, self._aligned, self.started = start, [(start, list(self._states))], state["started"]
        self.worker_init_fn.states = list(self._states)
        if state["before"] is not None:
            self.recorded.replay(state["before"], state["at_first"], start)
        if state["started"] is not None:
            state["started"].restore(self.generators)
        iterator = self.stock_iterator()
        self.recorded.end_replay()
        self.worker_init_fn.states = []
        for _ in range(state["delivered"] - start):
            self.receive(next(iterator))
        return iterator


def _generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, without duplicates."""
    holders: list[Any] = [loader]
    found: list[torch.Generator] = []
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found):
            found.append(generator)
        inner = [getattr(holder, name, None) for name in ("batch_sampler", "sampler")]
        holders += [item for item in inner if item is not None and all(item is not known for known in holders)]
    return found


def to_plain(state: LoaderState) -> LoaderState:
    """Convert a state to tensors, numbers and lists."""
    plain: LoaderState = {k: value.to_plain() if isinstance(value, LoaderRNG) else value for k, value in state.items()}
    plain["generators"] = list(state["generators"])
    if "states" in state:
        plain["states"] = [
            None if s is None else torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in state["states"]
        ]
    return plain


def from_plain(plain: LoaderState) -> LoaderState:
    """Read what `to_plain` returned."""
    state: LoaderState = {
        k: LoaderRNG.from_plain(value) if isinstance(value, dict) else value for k, value in plain.items()
    }
    if "states" in plain:
        state["states"] = [s.numpy().tobytes() if isinstance(s, Tensor) else None for s in plain["states"]]
    return state
