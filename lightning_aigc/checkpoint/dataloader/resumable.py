"""Make any training loader resumable: same samples, same order, same random augmentation after a resume."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_aigc._lightning import _Stateful, rank_zero_warn
from lightning_aigc.checkpoint.dataloader.stateful import (
    MapStyleLoader,
    RepeatedIterable,
    ResumableLoader,
    StatefulLoader,
)
from lightning_aigc.checkpoint.dataloader.worker import WorkerInit


def make_resumable(loader: Any) -> Any:
    """Make a loader that yields what `loader` yields and has `snapshot_state()`; `loader` itself does not change.

    Returns: `loader` itself if it is no DataLoader and has a state_dict.
    """
    if not isinstance(loader, DataLoader):
        return loader if isinstance(loader, _Stateful) else RepeatedIterable(loader)
    stock = type(loader)
    kind: type[ResumableLoader] = MapStyleLoader
    if isinstance(loader, _Stateful):
        kind = StatefulLoader
    elif isinstance(loader.dataset, IterableDataset) or stock.__iter__ is not DataLoader.__iter__:
        kind = ResumableLoader
    twin_class: Any = type(f"Resumable{stock.__name__}", (kind, stock), {})
    twin = twin_class.__new__(twin_class)
    # persistent workers belong to the loader that started them
    twin.__dict__ |= vars(loader) | {"_iterator": None, "worker_init_fn": WorkerInit(loader.worker_init_fn)}
    twin.init_state()
    return twin


def make_all_resumable(loaders: list[Any]) -> list[Any]:
    """Make each loader resumable, and warn about those that may not resume bit for bit."""
    made = [loader if isinstance(loader, ResumableLoader) else make_resumable(loader) for loader in loaders]
    for caveat in filter(None, map(resume_caveat, made)):
        rank_zero_warn(caveat)
    return made


def resume_caveat(loader: Any) -> str | None:
    """Why a loader of `make_resumable` may not resume bit for bit; None if it does."""
    if not isinstance(loader, ResumableLoader) or isinstance(loader, (StatefulLoader, MapStyleLoader)):
        return None
    if isinstance(loader, RepeatedIterable):
        if isinstance(loader.source, (list, tuple)):
            return None
        reason, instead = f"{type(loader.source).__name__} is no DataLoader", "a DataLoader"
    elif isinstance(loader.dataset, IterableDataset):  # type: ignore[attr-defined]
        reason, instead = f"{type(loader.dataset).__name__} is an IterableDataset", "a map-style dataset"  # type: ignore[attr-defined]
    else:
        reason, instead = f"{type(loader).__bases__[1].__name__} has its own __iter__", "a plain DataLoader"
    return (
        f"{reason} without state_dict: on resume its delivered batches are read again, which takes time and is exact"
        f" only if the same batches come again; give it state_dict and load_state_dict, or use {instead}"
    )
