"""A training loader that goes on in the middle of an epoch: same samples, same order, same random augmentation.

| loader                                             | how it finds its place again                                   |
|----------------------------------------------------|----------------------------------------------------------------|
| DataLoader over a map-style dataset                | the order is drawn again; workers get their random states back |
| anything with state_dict and load_state_dict       | by that, which Lightning keeps                                 |
| DataLoader over an IterableDataset, other iterable | what was delivered is read again and dropped                   |

Nothing is drawn that the stock loader would not draw: a run with it equals one without it, bit for bit.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities.types import _Stateful
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_aigc.checkpoint.drawn import Drawn, Draws
from lightning_aigc.checkpoint.worker import Stamped, WorkerStart

Place = dict[str, Any]
"""Batches delivered, and the random states that the epoch was drawn and its workers started under."""


def resumable(loader: Any) -> Any:
    """A loader that yields what `loader` does and knows its `place()`; the one given stays as it is.

    Returns: `loader` itself if it is no DataLoader and keeps its own state.
    """
    if not isinstance(loader, DataLoader):
        return loader if isinstance(loader, _Stateful) else RepeatedIterable(loader)
    stock = type(loader)
    kind: type[Resumable] = PlacedLoader
    if isinstance(loader, _Stateful):
        kind = StatefulLoader
    elif isinstance(loader.dataset, IterableDataset) or stock.__iter__ is not DataLoader.__iter__:
        kind = Resumable
    twin_class: Any = type(f"Resumable{stock.__name__}", (kind, stock), {})
    twin = twin_class.__new__(twin_class)
    # Workers that persist belong to the loader that started them.
    twin.__dict__ |= vars(loader) | {"_iterator": None, "worker_init_fn": WorkerStart(loader.worker_init_fn)}
    twin.begin()
    return twin


def what_may_differ(loader: Any) -> str | None:
    """A sentence about a loader of `resumable` that may not go on bit for bit; None for all others."""
    if not isinstance(loader, Resumable) or isinstance(loader, (StatefulLoader, PlacedLoader)):
        return None
    if isinstance(loader, RepeatedIterable):
        if isinstance(loader.source, (list, tuple)):
            return None
        what, instead = f"{type(loader.source).__name__} is no DataLoader", "a DataLoader"
    elif isinstance(loader.dataset, IterableDataset):  # type: ignore[attr-defined]
        what, instead = f"{type(loader.dataset).__name__} is an IterableDataset", "a map-style dataset"  # type: ignore[attr-defined]
    else:
        what, instead = f"{type(loader).__bases__[1].__name__} has its own __iter__", "a plain DataLoader"
    return (
        f"{what} without state_dict: on resume its batches are read again up to the place, which takes time and is"
        f" exact only if the same come again; give it state_dict and load_state_dict, or use {instead}"
    )


class Pass:
    """One iteration over a loader; begun with a place waiting, it is made ready by `Resumable.arrive`."""

    def __init__(self, loader: Resumable) -> None:
        self.loader = loader
        self.delivered = 0
        self.inner = loader.stock_iterator() if loader.waiting is None else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.inner is None:  # Lightning fetches a batch ahead, before the run has its own random states back
            now = Draws.take()
            self.loader.arrive()
            now.restore()
            assert self.inner is not None
        batch = self.loader.receive(next(self.inner))
        self.delivered += 1
        return batch


class Resumable:
    """Mixed into a DataLoader's class: what all kinds share, and the kind that reads again what was delivered."""

    def begin(self) -> None:
        self.waiting: Place | None = None
        self.made: Draws | None = None
        self.generators = _generators_of(self)
        self._pass: Callable[[], Pass | None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        if self.waiting is None:
            self.made = Draws.take(self.generators)
        one = Pass(self)
        # Weak: in a circle its workers would live until the collector runs, which may be in a worker.
        self._pass = weakref.ref(one)
        return one

    def stock_iterator(self) -> Iterator[Any]:
        return iter(super().__iter__())  # type: ignore[misc]

    def receive(self, data: Any) -> Any:
        return data

    def place(self, ahead: int = 0) -> Place:
        """Where the running pass is, not counting the batches fetched `ahead` of their use."""
        one = self._pass()
        delivered = one.delivered - ahead if one is not None else 0
        return {"delivered": delivered, "made": self.made, "generators": Draws.take(self.generators).generators}

    def place_after(self, delivered: int) -> Place:
        """A place after so many batches of an epoch that is drawn now, for a run that cannot draw the old one."""
        now = Draws.take(self.generators)
        return {"delivered": delivered, "made": now, "generators": now.generators}

    def go_to(self, place: Place) -> None:
        """Begin the next pass after this place."""
        self.waiting = place

    def arrive(self) -> None:
        """Make the waiting pass ready; the global random states are then whatever that left."""
        (place, self.waiting), one = (self.waiting, None), self._pass()
        if place is None or one is None:
            return
        self.made = place["made"]
        one.inner = self._iterator_at(place)
        one.delivered = place["delivered"]
        for generator, state in zip(self.generators, place["generators"], strict=True):
            generator.set_state(state)

    def _iterator_at(self, place: Place) -> Iterator[Any]:
        if place["made"] is not None:
            place["made"].restore(self.generators)
        iterator = self.stock_iterator()
        for _ in range(place["delivered"]):
            next(iterator, None)
        return iterator


class RepeatedIterable(Resumable):
    """Any iterable that is no DataLoader."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source
        self.begin()

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]  # raises TypeError for one that has none, as it should

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)

    def stock_iterator(self) -> Iterator[Any]:
        return iter(self.source)


class StatefulLoader(Resumable):
    """A DataLoader that Lightning has given its own state by now."""

    def _iterator_at(self, place: Place) -> Iterator[Any]:
        if place["made"] is not None:
            place["made"].restore(self.generators)
        iterator = self.stock_iterator()
        if not inspect.isgenerator(iterator):
            return iterator
        # Its workers start, and draw their seed, with the first batch: both belong to the time before.
        first = list(_up_to_one(iterator))
        return chain(first, iterator)


def _up_to_one(iterator: Iterator[Any]) -> Iterator[Any]:
    for item in iterator:
        yield item
        return


class PlacedLoader(Resumable):
    """A DataLoader over a map-style dataset.

    Batch i comes from worker i % num_workers. So it goes on at a multiple of num_workers, where each worker has its own
    number again and the random states that it had there; the few batches up to the place are made again and dropped.
    """

    num_workers: int
    persistent_workers: bool
    worker_init_fn: WorkerStart
    collate_fn: Any

    def begin(self) -> None:
        super().begin()
        self.drawn = Drawn(DataLoader._index_sampler.fget(self), self.generators)  # type: ignore[attr-defined]
        self.started: Draws | None = None
        self._states: list[bytes | None] = [None] * self.num_workers
        self._aligned: list[tuple[int, list[bytes | None]]] = []
        self._count = 0
        if self.num_workers:
            self.collate_fn = Stamped(self.collate_fn)

    @property
    def _index_sampler(self) -> Any:
        return self.__dict__["drawn"] if "drawn" in self.__dict__ else DataLoader._index_sampler.fget(self)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        if not self.persistent_workers:
            self._states = [None] * self.num_workers
        self._count, self._aligned = 0, [(0, list(self._states))]
        if self.waiting is None and (self.started is None or not self.persistent_workers):
            self.started = Draws.take(self.generators)
        return super().__iter__()

    def receive(self, data: Any) -> Any:
        if not self.num_workers:
            return data
        batch, self._states[self._count % self.num_workers] = data
        self._count += 1
        if self._count % self.num_workers == 0:
            self._aligned = [*self._aligned[-1:], (self._count, list(self._states))]
        return batch

    def place(self, ahead: int = 0) -> Place:
        place = super().place(ahead)
        at, states = next((a for a in reversed(self._aligned) if a[0] <= place["delivered"]), (0, []))
        place |= {"started": self.started, "before": self.drawn.before, "at_first": self.drawn.at_first}
        return place | {"workers": self.num_workers, "aligned": at, "states": states}

    def place_after(self, delivered: int) -> Place:
        place = super().place_after(delivered)
        return place | {"started": place["made"], "before": place["made"], "at_first": place["made"], "workers": -1}

    def _iterator_at(self, place: Place) -> Iterator[Any]:
        start = place["delivered"]
        if self.num_workers and place["workers"] == self.num_workers:
            start, self._states = place["aligned"], list(place["states"])
        self._count, self._aligned, self.started = start, [(start, list(self._states))], place["started"]
        self.worker_init_fn.states = list(self._states)
        if place["before"] is not None:
            self.drawn.draw_again(place["before"], place["at_first"], start)
        if place["started"] is not None:
            place["started"].restore(self.generators)
        iterator = self.stock_iterator()
        self.drawn.done()
        self.worker_init_fn.states = []
        for _ in range(place["delivered"] - start):
            self.receive(next(iterator))
        return iterator


def _generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, each once."""
    holders: list[Any] = [loader]
    found: list[torch.Generator] = []
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not one for one in found):
            found.append(generator)
        inner = [getattr(holder, name, None) for name in ("batch_sampler", "sampler")]
        holders += [one for one in inner if one is not None and all(one is not known for known in holders)]
    return found


def to_plain(place: Place) -> Place:
    """A place for the snapshot."""
    plain: Place = {key: one.to_plain() if isinstance(one, Draws) else one for key, one in place.items()}
    plain["generators"] = list(place["generators"])
    if "states" in place:
        plain["states"] = [
            None if s is None else torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in place["states"]
        ]
    return plain


def from_plain(plain: Place) -> Place:
    """What `to_plain` was given."""
    place: Place = {key: Draws.from_plain(one) if isinstance(one, dict) else one for key, one in plain.items()}
    if "states" in plain:
        place["states"] = [s.numpy().tobytes() if isinstance(s, Tensor) else None for s in plain["states"]]
    return place
