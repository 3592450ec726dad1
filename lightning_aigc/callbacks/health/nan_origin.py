"""Find the module that made a value that is not finite, by running the step's batches again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from lightning_aigc._lightning import LightningModule, Trainer, _DataLoaderIterDataFetcher
from lightning_aigc.precision.nan.non_finite import NonFinite
from lightning_aigc.precision.nan.replay import ReplayedBatch, arguments_for, find_non_finite
from lightning_aigc.rng import RandomStates, have_host_states_changed, random_states, tensor_states

KEPT_BATCHES = 8
"""Last batches of an accumulation window that can be run again; they stay on the device until its end."""
WATCHED_BATCHES, WATCHED_EVERY = 8, 10
"""Check the Python and numpy generators in the first batches, and later in every tenth:
reading those states at every batch would take longer than everything else here."""
SHARDED = "a sharded model runs on all ranks at once, which would have to agree on where to stop"
MANUAL = "under manual optimization a step moves the weights itself"


@dataclass(frozen=True)
class Replay:
    """Result of a second run of a step."""

    found: NonFinite | None = None
    why_not: str = ""
    """Why there was no second run, or not of every batch; empty where all values were finite."""


@dataclass
class _KeptBatch:
    batch: Any
    batch_idx: int
    states: RandomStates
    fetched: ReplayedBatch | None = None
    """Batch that a step with a `dataloader_iter` took from it."""
    is_watched: bool = False
    """Whether to look for a change of Python's or numpy's random state."""


class NanOrigin:
    """Keeps the batches of the running accumulation window, and runs them again to find where a step went wrong."""

    def __init__(self) -> None:
        self._kept: deque[_KeptBatch] = deque(maxlen=KEPT_BATCHES)
        self._window_batches = 0
        self._all_batches = 0
        self._draws_on_host = False

    def keep(self, model: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep a batch and the random states, at its start: a second run includes the module's own hooks."""
        self._window_batches += 1
        self._all_batches += 1
        is_watched = self._all_batches <= WATCHED_BATCHES or self._all_batches % WATCHED_EVERY == 0
        states = (random_states if self._draws_on_host or is_watched else tensor_states)(model.device)
        self._kept.append(_KeptBatch(batch, batch_idx, states, is_watched=is_watched and not self._draws_on_host))

    def keep_fetched(self, trainer: Trainer) -> None:
        """Keep what a step that takes a `dataloader_iter` got from it, before backward: it has its batch by then."""
        if self._kept and self._kept[-1].is_watched:
            self._draws_on_host = have_host_states_changed(self._kept[-1].states)
        fetcher = trainer.fit_loop._data_fetcher
        if self._kept and isinstance(fetcher, _DataLoaderIterDataFetcher):
            self._kept[-1].fetched = ReplayedBatch(fetcher)

    def clear(self) -> None:
        """Drop the batches, at the end of a window."""
        self._kept.clear()
        self._window_batches = 0

    def find(self, trainer: Trainer, model: LightningModule, scale: float) -> Replay:
        """Find the first module that made such a value, or why no second run could show it."""
        if not model.automatic_optimization:
            return Replay(why_not=MANUAL)
        if any(isinstance(p, DTensor) for p in model.parameters()):
            return Replay(why_not=SHARDED)
        why_not = "" if self._kept else "its batch was not kept"
        if self._window_batches > len(self._kept) > 0:
            why_not = f"of the {self._window_batches} accumulated batches the last {len(self._kept)} are kept"
        for kept in self._kept:
            arguments = [kept.fetched] if kept.fetched else arguments_for(model, kept.batch, kept.batch_idx)
            context = trainer.precision_plugin.forward_context
            found, reason = find_non_finite(model, arguments, kept.states, scale, context)
            why_not = reason or why_not
            if found is not None:
                return Replay(found)
        return Replay(why_not=why_not)
