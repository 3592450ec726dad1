"""Resumable loaders: the stock loader's batches, and the rest of them after a place that went through a file."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler

from fakes.runs.killed_trainings import Noisy
from lightning_aigc.checkpoint.dataloader import resumable, stateful
from lightning_aigc.checkpoint.dataloader.sampler import LoaderRNG
from lightning_aigc.checkpoint.files.serialization import pack, unpack

EPOCHS, BATCHES = 3, 12
pytestmark = pytest.mark.filterwarnings("ignore")


class DrawsAtOnce(Sampler[int]):
    """Draws when its iterator is made, and not with the first index."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(24).tolist())

    def __len__(self) -> int:
        return 24


MAKERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "shuffled": lambda **k: DataLoader(Noisy(), batch_size=2, shuffle=True, **k),
    "own generator": lambda **k: DataLoader(
        Noisy(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(4), **k
    ),
    "weighted": lambda **k: DataLoader(Noisy(), batch_size=2, sampler=WeightedRandomSampler(torch.ones(24), 24), **k),
    "drawn at once": lambda **k: DataLoader(Noisy(), batch_size=2, sampler=DrawsAtOnce(), **k),
}


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def epochs_of(loader: Any, stop: int | None = None) -> tuple[list[Tensor], Any]:
    """All batches, with other draws between them; and, if asked, the place after one and the random states there."""
    batches: list[Tensor] = []
    kept = None
    for epoch in range(EPOCHS):
        for batch in loader:
            batches.append(batch)
            torch.rand(2)
            if len(batches) == stop:
                tensors, skeleton = pack(stateful.to_plain(loader.snapshot_state()))
                kept = (epoch, stateful.from_plain(unpack(tensors, skeleton)), LoaderRNG.capture(loader.generators))
    return batches, kept


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_the_rest_comes_after_a_place(name: str, workers: int, persistent: bool) -> None:
    make = MAKERS[name]
    options = {"num_workers": workers, "persistent_workers": persistent}
    seed(0)
    plain, _ = epochs_of(make(**options))
    for stop in (5, BATCHES + 1):
        seed(0)
        batches, (epoch, place, draws) = epochs_of(resumable.make_resumable(make(**options)), stop)
        assert all(map(torch.equal, batches, plain))
        seed(99)
        loader = resumable.make_resumable(make(**options))
        loader.load_snapshot_state(place)
        running = iter(loader)
        loader.start_pending()
        draws.restore(loader.generators)
        rest = []
        for number in range(epoch, EPOCHS):
            for batch in running:
                rest.append(batch)
                torch.rand(2)
            if number + 1 < EPOCHS:
                running = iter(loader)
        assert len(rest) == EPOCHS * BATCHES - stop
        assert all(map(torch.equal, rest, plain[stop:]))


def test_the_loader_given_stays_as_it_is() -> None:
    loader = MAKERS["shuffled"](num_workers=2)
    before = dict(vars(loader))
    twin = resumable.make_resumable(loader)
    assert vars(loader) == before and type(loader) is DataLoader
    assert isinstance(twin, DataLoader) and twin.dataset is loader.dataset and len(twin) == len(loader)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_what_may_differ_is_named() -> None:
    stream = resumable.resume_caveat(resumable.make_resumable(DataLoader(Stream())))
    assert stream is not None and "Stream is an IterableDataset without state_dict" in stream
    assert "map object is no DataLoader" not in str(resumable.resume_caveat(resumable.make_resumable([1, 2])))
    assert resumable.resume_caveat(resumable.make_resumable(MAKERS["shuffled"]())) is None


def test_an_iterable_is_read_again_up_to_the_place() -> None:
    loader = resumable.make_resumable([1, 2, 3, 4])
    loader.load_snapshot_state(loader.state_after(2))
    running = iter(loader)
    loader.start_pending()
    assert list(running) == [3, 4] and len(loader) == 4
