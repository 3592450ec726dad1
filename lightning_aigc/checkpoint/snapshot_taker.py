"""Snapshots of one fit: which state goes into them, and when weights may change again."""

from __future__ import annotations

import time
from typing import Any

from lightning_aigc._lightning import Trainer, rank_zero_warn
from lightning_aigc.checkpoint import training_state
from lightning_aigc.checkpoint.files.reader import find_snapshots
from lightning_aigc.checkpoint.files.staging import DeferredCopies
from lightning_aigc.checkpoint.files.storage import name_of, remove
from lightning_aigc.checkpoint.files.writer import SnapshotWriter
from lightning_aigc.checkpoint.lightning_loops import LoopState, State
from lightning_aigc.checkpoint.run_config import device_name, limits_of
from lightning_aigc.checkpoint.training_state import LocalState
from lightning_aigc.errors import SnapshotError

LAST_COMMIT_S = 30.0
"""A rank that met an error may never write its files."""


class SnapshotTaker:
    """Takes the snapshots of one fit.

    Args: keep_best: a logged metric; the snapshot with its best value is never removed.
    Attributes:
        last_state: The loops' state in the last snapshot, durable or in flight; None after a failure.
        is_torn: Whether a weight changed during the last snapshot, so that another is due.
        blocked_s: How long each snapshot blocked training.
        best: The best value of `keep_best`.
        options: The optimizers' options as the run's configuration has them (`configured_options`).
        logged: Names of the metrics logged by the last snapshot.
    """

    def __init__(self, writer: SnapshotWriter, keep_best: str | None, best_mode: str, blocked_s: list[float]) -> None:
        self.writer, self.blocked_s = writer, blocked_s
        self.last_state: LoopState | None = None
        self.is_torn = False
        self.last_step, self.last_time = 0, 0.0
        self.best: float | None = None
        self.options: list[list[dict[str, Any]]] = []
        self.logged: list[str] = []
        self._keep_best, self._best_mode = keep_best, best_mode
        self._deferred: DeferredCopies | None = None
        self._may_defer = True

    def begin(self, trainer: Trainer, config: dict[str, Any], local_state: LocalState) -> None:
        """Call it once the model and its optimizers exist."""
        self._config, self._local_state = config, local_state
        self.last_step, self.last_time = trainer.global_step, time.monotonic()
        if self._keep_best is not None:  # the best snapshot of an earlier part of this run
            for snapshot in find_snapshots(self.writer.directory):
                self._protect_best(snapshot.step, snapshot.facts.get("metrics", {}).get(self._keep_best))

    def capture(self, trainer: Trainer, loop_state: LoopState) -> tuple[State, State]:
        """This rank's own and the shared state, holding the Trainer's tensors themselves."""
        return training_state.capture(trainer, loop_state, self._local_state)

    def save(
        self,
        trainer: Trainer,
        loop_state: LoopState,
        states: tuple[State, State] | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Start a snapshot of these states, by default of now.

        Args: at_once: copy everything before returning, nothing during training.
        """
        self.report_failure()
        start = time.perf_counter()
        own, shared = self.capture(trainer, loop_state) if states is None else states
        deferred = DeferredCopies(trainer, shared or own["checkpoint"]) if self._may_defer and not at_once else None
        addresses = () if deferred is None else deferred.addresses
        facts = self._facts(trainer, loop_state)
        self.writer.save(loop_state.step, own, shared if trainer.is_global_zero else None, facts, deferred=addresses)
        self._deferred = deferred if addresses else None
        self.blocked_s.append(time.perf_counter() - start)
        self.last_state, self.is_torn = loop_state, False
        self.last_step, self.last_time = loop_state.step, time.monotonic()

    def skip(self, loop_state: LoopState) -> None:
        """Count a snapshot that was due as taken; the next one is due after as many steps and seconds again."""
        self.last_state, self.is_torn = None, False
        self.last_step, self.last_time = loop_state.step, time.monotonic()

    def save_last(self, trainer: Trainer, loop_state: LoopState) -> None:
        """Start a snapshot after an error, which waits for the other ranks' files for `LAST_COMMIT_S` at most."""
        self.writer.commit_timeout_s = min(self.writer.commit_timeout_s, LAST_COMMIT_S)
        self.save(trainer, loop_state, at_once=True)

    def finish_copy(self) -> None:
        """Call it before anything writes a weight: returns when the copy during training is complete."""
        if self._deferred is None:
            return
        start = time.perf_counter()
        self.writer.finish_copy()
        deferred, self._deferred = self._deferred, None
        self.blocked_s[-1] += time.perf_counter() - start
        if deferred.were_written():
            self._may_defer, self.is_torn, self.last_state = False, True, None
            self.writer.wait()
            if self.writer.rank == 0:
                remove(self.writer.directory / name_of(self.last_step))
            rank_zero_warn(
                "a trained weight changed outside of the optimizer's step while it was being copied for a snapshot;"
                " from here on snapshots copy all weights before training continues"
            )

    def has_saved(self, loop_state: LoopState) -> bool:
        """Whether the last snapshot is of this state, durable or in flight, and untorn."""
        return self.last_state is loop_state and not self.is_torn

    def amend(self, loop_state: LoopState, facts: dict[str, Any]) -> None:
        """Add facts to the snapshot of this state, or warn why not. Rank 0 alone calls it."""
        try:
            self.writer.amend(loop_state.step, facts)
        except SnapshotError as error:
            rank_zero_warn(str(error))

    def report_missing_best(self) -> None:
        """Warn if `keep_best` was never logged."""
        if self._keep_best is not None and self.best is None:
            rank_zero_warn(
                f"ExactSnapshot.keep_best: {self._keep_best} was never logged, so no best snapshot was kept; logged"
                f" were {', '.join(self.logged) or 'no metrics'}"
            )

    def report_failure(self) -> None:
        """Warn about a snapshot that could not be written."""
        error = self.writer.error()
        if error is not None:
            self.last_state = None
            rank_zero_warn(str(error))

    def _facts(self, trainer: Trainer, loop_state: LoopState) -> dict[str, Any]:
        facts: dict[str, Any] = {"config": self._config, "device": device_name(trainer)}
        facts |= {"limits": limits_of(trainer, trainer.lightning_module), "options": self.options}
        if self._keep_best is not None:
            logged = loop_state.metrics["callback"]
            self.logged = sorted(logged)
            if self._keep_best in logged:
                facts["metrics"] = {self._keep_best: float(logged[self._keep_best])}
                self._protect_best(loop_state.step, facts["metrics"][self._keep_best])
        return facts

    def _protect_best(self, step: int, value: float | None) -> None:
        if value is None or value != value:
            return
        is_better = self.best is None or (value < self.best if self._best_mode == "min" else value > self.best)
        if is_better:
            self.best, self.writer.protected = value, {step}
