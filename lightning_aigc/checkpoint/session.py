"""SnapshotSession: the snapshots of one fit, from the choice of one to resume from to the last.

`ExactSnapshot` forwards Lightning's hooks to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_aigc._lightning import LightningModule, Trainer, rank_zero_info, rank_zero_warn
from lightning_aigc.checkpoint.coordination import all_agree, check_shared
from lightning_aigc.checkpoint.dataloader.resumable import make_all_resumable
from lightning_aigc.checkpoint.files.writer import SnapshotWriter
from lightning_aigc.checkpoint.lightning_loops import (
    LoopHooks,
    LoopState,
    State,
    is_chosen_by_lightning,
    mute_sigterm_broadcast,
    run_end_hooks,
)
from lightning_aigc.checkpoint.preemption import StopPoll, end_run
from lightning_aigc.checkpoint.resume import (
    LATEST,
    ResumeSession,
    choose_snapshot,
    go_back,
    last_sentence,
    resume_command,
    set_aside,
)
from lightning_aigc.checkpoint.run_config import final_facts, finished_sentence, is_over, training_config
from lightning_aigc.checkpoint.snapshot_taker import SnapshotTaker
from lightning_aigc.checkpoint.training_state import (
    ChangeTracker,
    LocalState,
    apply_options,
    check_strategy,
    configured_options,
    weights_are_finite,
)
from lightning_aigc.errors import ConfigError, SnapshotError
from lightning_aigc.gradient_sync.transport.process_groups import errors_as_warnings, say_error

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class SnapshotOptions:
    """Arguments of `ExactSnapshot`."""

    every_n_steps: int
    keep_last: int
    every_n_seconds: float | None
    on_signal: bool
    keep_best: str | None
    best_mode: Mode
    directory: str | None


class SnapshotSession:
    """The snapshots of one fit.

    Args:
        trainer: In its `setup`; the session attaches itself to the Trainer's loops.
        options: As the user gave them.
        blocked_s: Receives the seconds for which each snapshot blocked training.

    Raises: SnapshotError for a folder that cannot be used; ConfigError for a strategy without exact snapshots.
    """

    def __init__(self, trainer: Trainer, options: SnapshotOptions, blocked_s: list[float]) -> None:
        check_strategy(trainer)
        self.trainer, self.options = trainer, options
        self.resumed_step = -1
        """Step of the snapshot that this fit continues from; -1 without one."""
        self.is_over = False
        """Whether the run that is resumed has finished already."""
        self.is_closed = False
        self._loads = 0
        """Number of times that a checkpoint was asked for: the fit's own, then those of Lightning's trials."""
        self._is_trial = False
        """Whether the loops run for Lightning's Tuner, whose steps are taken back."""
        self._are_finite = True
        """Whether the trained weights were when they were last looked at."""
        self._poll = StopPoll(options.on_signal, options.every_n_seconds)
        self._resuming: ResumeSession | None = None
        self._loop_state: LoopState | None = None
        """The loops' state after the last micro-batch."""
        self._changes = ChangeTracker()
        self._local_state: LocalState
        self._final_state: tuple[State, State] | None = None
        self._final_facts: dict[str, Any] | None = None
        default = str(Path(trainer.default_root_dir) / "snapshots")
        directory = trainer.strategy.broadcast(options.directory or default)
        writer = SnapshotWriter(
            directory, rank=trainer.global_rank, world_size=trainer.world_size, keep_last=options.keep_last
        )
        self.taker = SnapshotTaker(writer, options.keep_best, options.best_mode, blocked_s)
        writer.open()
        check_shared(directory, trainer.strategy)
        writer.watch_ranks()
        self._hooks = LoopHooks(
            trainer,
            on_checkpoint=self._load,
            on_optimizers=self._load_optimizers,
            on_loaders=self._prepare_loaders,
            on_epoch=self._finish_resume,
            on_batch_over=self.after_batch,
            on_run=self._run,
        )
        self._poll.watch(trainer)

    # Start -----------------------------------------------------------------------------------------------------------

    def _load(self, path: Any, stock: Callable[[Any], None]) -> None:
        """Load a snapshot, Lightning's own checkpoint, or nothing, instead of Lightning's loading."""
        self._loads += 1
        if self._loads > 1:  # the state before a trial comes back
            stock(path)
            return
        directory, trainer = self.taker.writer.directory, self.trainer
        if is_chosen_by_lightning(trainer, path):
            rank_zero_warn(
                f"{path} is Lightning's checkpoint of a job that SLURM requeued, and is not loaded unasked; delete it,"
                f" or resume from it with: {resume_command(snapshot=Path(path))}"
            )
            path = None
        snapshot = choose_snapshot(trainer, directory, path)
        if snapshot is None:
            stock(None if path == LATEST else path)
        else:
            self._resuming = ResumeSession(trainer, snapshot, is_named=path != LATEST)
            self.resumed_step = snapshot.step
            self._resuming.load()
            self.is_over = trainer.strategy.broadcast(is_over(snapshot, trainer, trainer.lightning_module))
            if self.is_over:
                rank_zero_info(finished_sentence(snapshot, trainer.default_root_dir))
        if trainer.is_global_zero and not self.is_over:
            set_aside(directory, self.resumed_step)
        trainer.strategy.barrier("snapshots")

    def _load_optimizers(self, stock: Callable[[], None]) -> None:
        """Load the optimizers' state, with this run's options where the snapshot's run had others."""
        if self._loads > 1:
            stock()
            return
        now = configured_options(self.trainer)
        stock()
        self.taker.options = now
        if self._resuming is not None:
            apply_options(self.trainer, self._resuming.snapshot.facts.get("options"), now)

    def _run(self, stock: Callable[[], None]) -> None:
        """Run the fit loop, nothing if the run is over, or the end that a killed run still has to do."""
        if session_of(self.trainer) is not self:  # Lightning's Tuner takes the callbacks away for its trials
            self._run_trial(stock)
            return
        if self.is_over:
            return
        stock()
        if self._resuming is not None:  # Lightning saw that no step is left and started nothing
            run_end_hooks(self.trainer)

    def _run_trial(self, stock: Callable[[], None]) -> None:
        """Run the fit loop without snapshots, for a search of the learning rate or the batch size."""
        if self._resuming is not None:
            raise ConfigError(
                f"a search of the learning rate or the batch size cannot start from the snapshot of step"
                f" {self.resumed_step}; take LearningRateFinder and BatchSizeFinder out of trainer.callbacks to resume"
            )
        self.before_write()
        self._is_trial = True
        try:
            stock()
        finally:
            self._is_trial = False

    def _prepare_loaders(self, loaders: list[Any]) -> list[Any]:
        loaders = make_all_resumable(loaders)
        if self._resuming is not None:
            self._resuming.load_loaders(loaders)
        return loaders

    def start(self, module: LightningModule) -> None:
        """Begin to take snapshots, once the module and its optimizers are set up."""
        if self._resuming is not None:
            self._resuming.compare_config("after")
        self._local_state = LocalState(module)
        self._changes = ChangeTracker(module)
        if self._resuming is None:
            self.taker.options = configured_options(self.trainer)
        self.taker.begin(self.trainer, training_config(self.trainer, module), self._local_state)
        self._poll.start(self.trainer)
        if self.options.on_signal:
            mute_sigterm_broadcast(self.trainer)  # `after_batch` asks the ranks about all signals

    def _finish_resume(self) -> None:
        """Restore the rest of the snapshot, between two micro-batches of this epoch or after its last."""
        resuming, self._resuming = self._resuming, None
        if resuming is None:
            return
        loop_state = resuming.finish(self._local_state)
        if not self.trainer.fit_loop.epoch_loop.done:
            return
        self._loop_state, self._final_state = loop_state, self.taker.capture(self.trainer, loop_state)
        if resuming.is_of_this_run(self.taker.writer.directory):
            self.taker.last_state = loop_state

    # Training --------------------------------------------------------------------------------------------------------

    def after_batch(self) -> None:
        """Take a snapshot if one is due, or take one and end the run if a signal asks for that."""
        if self._is_trial:
            return
        taker, trainer = self.taker, self.trainer
        taker.finish_copy()
        self._loop_state = LoopState.capture(trainer)
        self._changes.mark()
        number, is_due = self._poll.ask(taker.last_time)
        if number:
            self._stop(number)
        every, step = self.options.every_n_steps, trainer.global_step
        if is_due or taker.is_torn or (every and step // every > taker.last_step // every):
            self._save(self._loop_state)
        if trainer.fit_loop.epoch_loop.done:
            self._final_state = taker.capture(trainer, self._loop_state)

    def _save(self, loop_state: LoopState, states: tuple[State, State] | None = None, *, at_once: bool = False) -> None:
        """Take a snapshot, but none of weights that are not finite: no run could go on from it. Collective."""
        trainer, taker = self.trainer, self.taker
        were_finite, here = self._are_finite, weights_are_finite(trainer.lightning_module)
        self._are_finite = trainer.strategy.reduce_boolean_decision(here, all=True)
        if self._are_finite:
            taker.save(trainer, loop_state, states, at_once=at_once)
            return
        taker.skip(loop_state)
        if were_finite:
            with contextlib.suppress(SnapshotError):  # the next save reports it
                taker.writer.wait()
            rank_zero_warn(
                f"step {loop_state.step}: trained weights are not finite, so no snapshot is taken from here on;"
                f" lower the learning rate and {go_back(taker.writer.directory)}"
            )

    @property
    def is_told_to_end(self) -> bool:
        """Whether a stop signal has arrived here, which the next `after_batch` obeys."""
        return self._poll.has_signal

    def before_backward(self) -> None:
        """Note that backward is about to write gradients, inside an accumulation window."""
        if self._loop_state is not None and self._loop_state.is_window_open:
            self._changes.touch()

    def before_write(self) -> None:
        """Finish the copy before the optimizer or another callback writes a weight."""
        self._changes.touch()
        self.taker.finish_copy()

    def touch(self) -> None:
        """Note that the state has changed since the last micro-batch."""
        self._changes.touch()

    # End -------------------------------------------------------------------------------------------------------------

    def _stop(self, number: int) -> None:
        """Take a durable snapshot, then end the run as the signal asks."""
        assert self._loop_state is not None
        self._save(self._loop_state, at_once=True)
        self.taker.writer.wait()
        self.trainer.strategy.barrier("snapshot")
        self.close()
        if self.taker.has_saved(self._loop_state):
            rank_zero_info(f"\nstep {self._loop_state.step} is saved; resume with: {resume_command()}")
        end_run(self.trainer, number)

    def on_exception(self, exception: BaseException) -> None:
        """Save the state after the last micro-batch if no rank has changed it, and say how to resume."""
        taker, writer, trainer, loop_state = self.taker, self.taker.writer, self.trainer, self._loop_state
        if trainer.world_size > 1 and isinstance(exception, Exception):  # what follows may take seconds
            say_error(exception, trainer.global_rank)
        with errors_as_warnings():
            try:
                taker.finish_copy()
                writer.join()  # before the vote: rank 0's commit clears leftovers, votes too
                taker.report_failure()
                if loop_state is not None and self._can_save(loop_state):
                    taker.save_last(trainer, loop_state)
                writer.wait()
            except SnapshotError as failure:
                rank_zero_warn(str(failure))
        with errors_as_warnings():
            self.close()
        if loop_state is None:  # nothing was trained, and nothing is lost
            return
        if self._are_finite:
            sentence = last_sentence(writer.directory)
        else:
            sentence = f"trained weights are not finite; lower the learning rate and {go_back(writer.directory)}"
        rank_zero_info(sentence)
        if trainer.is_global_zero:
            exception.add_note(sentence)  # a traceback ends with it

    def _can_save(self, loop_state: LoopState) -> bool:
        """Whether no rank's state has changed since the last complete micro-batch."""
        trainer, writer = self.trainer, self.taker.writer
        with contextlib.suppress(RuntimeError):  # the device may have no memory left, or be lost
            self._are_finite = weights_are_finite(trainer.lightning_module)
        is_unchanged = loop_state.step > self.resumed_step and self._changes.none_since_mark() and self._are_finite
        if trainer.world_size == 1:
            return is_unchanged
        vote = f"step {loop_state.step}, batch {trainer.fit_loop.total_batch_idx}" if is_unchanged else None
        return all_agree(writer.directory, trainer.global_rank, trainer.world_size, vote, watched=writer.watched)

    def save_end(self) -> None:
        """Save the trained state before other callbacks load averaged weights, sample, score and write."""
        self.taker.finish_copy()
        self._poll.stop()
        states, self._final_state = self._final_state, None
        if states is not None and self._loop_state is not None and not self.taker.has_saved(self._loop_state):
            self._save(self._loop_state, states, at_once=True)
            self.taker.writer.finish_copy()

    def end_fit(self, module: LightningModule) -> None:
        """Wait for the last snapshot, and note the facts of a finished run."""
        try:
            self.taker.writer.wait()
            if self._loop_state is not None and self.taker.has_saved(self._loop_state):
                self._final_facts = final_facts(self.trainer, module)
        except SnapshotError as error:
            rank_zero_warn(str(error))
        if not self.is_over:
            self.taker.report_missing_best()

    def record_end(self) -> None:
        """Record in the last snapshot that the run has finished, once its final files are written."""
        facts, self._final_facts = self._final_facts, None
        if facts is not None and self._loop_state is not None and self.trainer.is_global_zero:
            self.taker.amend(self._loop_state, facts)
        self.close()

    def close(self) -> None:
        """Detach from the Trainer's loops and release the folder."""
        self.is_closed = True
        self._poll.close()
        self._hooks.remove()
        self.taker.writer.close()

    def abandon(self) -> None:
        """Release the folder as a killed process does: nothing more is written for this run."""
        with contextlib.suppress(SnapshotError):
            self.close()


def session_of(trainer: Trainer) -> SnapshotSession | None:
    """Return the snapshots of the Trainer's running fit; None without any."""
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    sessions = [session for c in found if isinstance(session := getattr(c, "session", None), SnapshotSession)]
    return sessions[0] if sessions else None
