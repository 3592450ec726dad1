"""Snapshots of a Trainer: what goes into one, and the copies that end before anything may write a weight."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_aigc.checkpoint import whole_state
from lightning_aigc.checkpoint.arrival import device_name
from lightning_aigc.checkpoint.catalog import find_snapshots
from lightning_aigc.checkpoint.ending import limits_of
from lightning_aigc.checkpoint.folders import name_of, remove
from lightning_aigc.checkpoint.late import LateTensors
from lightning_aigc.checkpoint.store import SnapshotStore
from lightning_aigc.checkpoint.trainer_state import Moment, OwnBuffers, State


class SnapshotTaker:
    """Takes the snapshots of one fit.

    Args: keep_best: a logged metric; the snapshot with its best value is protected in the store.
    Attributes:
        kept: The last moment that has a snapshot, whole or on its way.
        is_torn: Whether the last snapshot was spoiled, so that one is due.
        blocked_s: How long each one kept training waiting.
        best: The best value of `keep_best`.
        logged: Metrics that there were at the last snapshot.
    """

    def __init__(self, store: SnapshotStore, keep_best: str | None, best_mode: str, blocked_s: list[float]) -> None:
        self.store, self.blocked_s = store, blocked_s
        self.kept: Moment | None = None
        self.is_torn = False
        self.last_step, self.last_time = 0, 0.0
        self.best: float | None = None
        self.logged: list[str] = []
        self._keep_best, self._best_mode = keep_best, best_mode
        self._late: LateTensors | None = None
        self._may_be_late = True

    def begin(self, trainer: Trainer, config: dict[str, Any], own_buffers: OwnBuffers) -> None:
        """Once the model and its optimizers are made."""
        self._config, self._own_buffers = config, own_buffers
        self.last_step, self.last_time = trainer.global_step, time.monotonic()
        if self._keep_best is not None:  # what an earlier part of this run has kept
            for snapshot in find_snapshots(self.store.directory):
                self._protect_best(snapshot.step, snapshot.facts.get("metrics", {}).get(self._keep_best))

    def take(self, trainer: Trainer, moment: Moment) -> tuple[State, State]:
        """The states of this moment, with the Trainer's own tensors in them."""
        return whole_state.take(trainer, moment, self._own_buffers)

    def save(
        self, trainer: Trainer, moment: Moment, states: tuple[State, State] | None = None, *, at_once: bool = False
    ) -> None:
        """Begin a snapshot of these states, of now by default; `at_once`: nothing is copied beside training."""
        self.say_failure()
        start = time.perf_counter()
        own, shared = self.take(trainer, moment) if states is None else states
        is_late = self._may_be_late and not at_once
        late = LateTensors(trainer, shared or own["checkpoint"]) if is_late else None
        addresses = () if late is None else late.addresses
        facts = self._facts(trainer, moment)
        self.store.save(moment.step, own, shared if trainer.is_global_zero else None, facts, late=addresses)
        self._late = late if addresses else None
        self.blocked_s.append(time.perf_counter() - start)
        self.kept, self.is_torn = moment, False
        self.last_step, self.last_time = moment.step, time.monotonic()

    def finish_copy(self) -> None:
        """Before anything may write a weight: the background copy is complete, and nothing was written meanwhile."""
        if self._late is None:
            return
        start = time.perf_counter()
        self.store.finish_copy()
        late, self._late = self._late, None
        self.blocked_s[-1] += time.perf_counter() - start
        if late.were_written():
            self._may_be_late, self.is_torn, self.kept = False, True, None
            self.store.wait()
            if self.store.rank == 0:
                remove(self.store.directory / name_of(self.last_step))
            rank_zero_warn(
                "a trained weight changed outside of the optimizer's step while it was being copied for a snapshot;"
                " from here on snapshots copy all weights before training goes on"
            )

    def say_failure(self) -> None:
        error = self.store.error()
        if error is not None:
            self.kept = None
            rank_zero_warn(str(error))

    def _facts(self, trainer: Trainer, moment: Moment) -> dict[str, Any]:
        facts: dict[str, Any] = {"config": self._config, "device": device_name(trainer)}
        facts["limits"] = limits_of(trainer, trainer.lightning_module)
        if self._keep_best is not None:
            logged = moment.metrics["callback"]
            self.logged = sorted(logged)
            if self._keep_best in logged:
                facts["metrics"] = {self._keep_best: float(logged[self._keep_best])}
                self._protect_best(moment.step, facts["metrics"][self._keep_best])
        return facts

    def _protect_best(self, step: int, value: float | None) -> None:
        if value is None or value != value:
            return
        is_better = self.best is None or (value < self.best if self._best_mode == "min" else value > self.best)
        if is_better:
            self.best, self.store.protected = value, {step}
