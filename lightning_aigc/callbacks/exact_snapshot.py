"""ExactSnapshot: a training that was killed at any moment resumes as if it had not been."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc.callbacks.run_report.run_facts import snapshots_in
from lightning_aigc.checkpoint import SnapshotWriter
from lightning_aigc.checkpoint.coordination import all_agree, check_shared
from lightning_aigc.checkpoint.dataloader.resumable import make_all_resumable
from lightning_aigc.checkpoint.lightning_loops import LoopHooks, LoopState, State, mute_sigterm_broadcast, run_end_hooks
from lightning_aigc.checkpoint.preemption import StopPoll, end_run
from lightning_aigc.checkpoint.resume import (
    LATEST,
    ResumeSession,
    choose_snapshot,
    report_last,
    resume_command,
    set_aside,
)
from lightning_aigc.checkpoint.run_config import final_facts, finished_sentence, is_over, training_config
from lightning_aigc.checkpoint.snapshot_taker import SnapshotTaker
from lightning_aigc.checkpoint.training_state import ChangeTracker, LocalBuffers, check_strategy
from lightning_aigc.errors import ConfigError, SnapshotError

Mode = Literal["min", "max"]


class ExactSnapshot(Callback):
    """Saves the whole state of a training regularly, so that `lightning fit --resume` ends with the same bits.

    Works with any LightningModule and any loader. In Python: `trainer.fit(module, data, ckpt_path="latest")`, or the
    folder of one snapshot. The run itself does not change by a bit. docs/resume.md says what is saved, and what cannot
    be exact.

    Args:
        every_n_steps: Optimizer steps between two snapshots; 0 for none of these.
        keep_last: Snapshots to keep.
        every_n_seconds: Seconds after which a snapshot is due as well.
        on_signal: On SIGTERM, Ctrl-C and SLURM's requeue signal, take a snapshot after the running batch, then end.
        keep_best: A logged metric; the snapshot with its best value is kept besides the last ones.
        best_mode: Whether the best value is the max or the min.
        directory: Where they go; unset means `<default_root_dir>/snapshots`.

    Raises: ConfigError that names the wrong argument.
    """

    def __init__(
        self,
        every_n_steps: int = 500,
        keep_last: int = 5,
        every_n_seconds: float | None = None,
        on_signal: bool = True,
        keep_best: str | None = None,
        best_mode: Mode = "min",
        directory: str | None = None,
    ) -> None:
        for name, value, least in (("every_n_steps", every_n_steps, 0), ("keep_last", keep_last, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"ExactSnapshot.{name} must be {least} or more, got {value!r}")
        if every_n_seconds is not None and not every_n_seconds > 0:
            raise ConfigError(f"ExactSnapshot.every_n_seconds must be more than 0, or unset; got {every_n_seconds!r}")
        if best_mode not in Mode.__args__:  # type: ignore[attr-defined]
            raise ConfigError(f"ExactSnapshot.best_mode must be min or max, got {best_mode!r}")
        self.every_n_steps, self.keep_last, self.every_n_seconds = every_n_steps, keep_last, every_n_seconds
        self.on_signal, self.keep_best, self.best_mode, self.directory = on_signal, keep_best, best_mode, directory
        self.blocked_s: list[float] = []
        """Seconds for which each snapshot of this fit blocked training."""
        self._reset()

    def _reset(self) -> None:
        self._is_on = False
        self._taker: SnapshotTaker | None = None
        self._hooks: LoopHooks | None = None
        self._poll = StopPoll(self.on_signal, self.every_n_seconds)
        self._resuming: ResumeSession | None = None
        self.resumed_step = -1
        """Step of the snapshot that this fit goes on from; -1 without one."""
        self._loop_state: LoopState | None = None
        """The loops' state after the last micro-batch."""
        self._changes = ChangeTracker()
        self._is_over = False
        self._final_state: tuple[State, State] | None = None
        self._final_facts: dict[str, Any] | None = None

    # The fit's beginning ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        check_strategy(trainer)
        self._reset()
        self.blocked_s = []
        self._is_on = True
        # First, so that copies are complete before another callback writes a weight.
        trainer.callbacks = [self, *(c for c in trainer.callbacks if c is not self)]  # type: ignore[attr-defined]
        directory = trainer.strategy.broadcast(self.directory or str(Path(trainer.default_root_dir) / "snapshots"))
        writer = SnapshotWriter(
            directory, rank=trainer.global_rank, world_size=trainer.world_size, keep_last=self.keep_last
        )
        self._taker = SnapshotTaker(writer, self.keep_best, self.best_mode, self.blocked_s)
        writer.open()
        check_shared(directory, trainer.strategy)
        writer.watch_ranks()
        self._hooks = LoopHooks(
            trainer,
            on_checkpoint=lambda path, stock: self._start(trainer, path, stock),
            on_loaders=self._prepare_loaders,
            on_epoch=lambda: self._finish_resume(trainer),
            on_batch_over=lambda: self._after_batch(trainer),
            on_run=lambda stock: self._run(trainer, stock),
        )

    def _start(self, trainer: Trainer, path: Any, stock: Callable[[Any], None]) -> None:
        """Load a snapshot, Lightning's own checkpoint, or nothing, in place of Lightning's loading."""
        directory = self._opened().writer.directory
        snapshot = choose_snapshot(trainer, directory, path)
        if snapshot is None:
            stock(None if path == LATEST else path)
        else:
            self._resuming = ResumeSession(trainer, snapshot, is_named=path != LATEST)
            self.resumed_step = snapshot.step
            self._resuming.load()
            self._is_over = trainer.strategy.broadcast(is_over(snapshot, trainer, trainer.lightning_module))
            if self._is_over:
                rank_zero_info(finished_sentence(snapshot, trainer.default_root_dir))
        if trainer.is_global_zero and not self._is_over:
            set_aside(directory, self.resumed_step)
        trainer.strategy.barrier("snapshots")

    def _run(self, trainer: Trainer, stock: Callable[[], None]) -> None:
        """Run the fit loop, or nothing if the run is over, or the end that a killed run still has to do."""
        if self._is_over:
            return
        stock()
        if self._resuming is not None:  # Lightning saw that no step is left and started nothing
            run_end_hooks(trainer)

    def _prepare_loaders(self, loaders: list[Any]) -> list[Any]:
        loaders = make_all_resumable(loaders)
        if self._resuming is not None:
            self._resuming.load_loaders(loaders)
        return loaders

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on:
            return
        if self._resuming is not None:
            self._resuming.compare_config("after")
        self._local_buffers = LocalBuffers(pl_module)
        self._changes = ChangeTracker(pl_module)
        self._opened().begin(trainer, training_config(trainer, pl_module), self._local_buffers)
        self._poll.start(trainer)
        if self.on_signal:
            mute_sigterm_broadcast(trainer)  # `_after_batch` asks the ranks about all signals

    def _finish_resume(self, trainer: Trainer) -> None:
        """Restore the rest of the snapshot, between two micro-batches of this epoch or after its last."""
        resuming, self._resuming = self._resuming, None
        if resuming is None:
            return
        loop_state, taker = resuming.finish(self._local_buffers), self._opened()
        if not trainer.fit_loop.epoch_loop.done:
            return
        self._loop_state, self._final_state = loop_state, taker.capture(trainer, loop_state)
        if resuming.is_of_this_run(taker.writer.directory):
            taker.last_state = loop_state

    # A batch ---------------------------------------------------------------------------------------------------------

    def _after_batch(self, trainer: Trainer) -> None:
        taker = self._opened()
        taker.finish_copy()
        self._loop_state = LoopState.capture(trainer)
        self._changes.mark()
        number, is_due = self._poll.ask(taker.last_time)
        if number:
            self._stop(trainer, number)
        every, step = self.every_n_steps, trainer.global_step
        if is_due or taker.is_torn or (every and step // every > taker.last_step // every):
            taker.save(trainer, self._loop_state)
        if trainer.fit_loop.epoch_loop.done:
            self._final_state = taker.capture(trainer, self._loop_state)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._loop_state is not None and self._loop_state.is_window_open:
            self._changes.touch()  # backward is about to write gradients

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._changes.touch()
        self._finish_copy()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._finish_copy()

    def report_entries(self) -> dict[str, Any]:
        """This fit's snapshots and the newest that is complete, for RunReport's page."""
        return {} if self._taker is None else {"snapshots": snapshots_in(self._taker.writer.directory, self.blocked_s)}

    def wait(self) -> None:
        """Return when the last snapshot of this run is durable; raises what its writing raised."""
        self._opened().writer.wait()

    def _finish_copy(self) -> None:
        if self._taker is not None:
            self._taker.finish_copy()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._changes.touch()

    # Ends ------------------------------------------------------------------------------------------------------------

    def _stop(self, trainer: Trainer, number: int) -> None:
        """Take a durable snapshot, then end the run as the signal asks."""
        taker = self._opened()
        assert self._loop_state is not None
        taker.save(trainer, self._loop_state, at_once=True)
        self.wait()
        trainer.strategy.barrier("snapshot")
        self._close()
        rank_zero_info(f"\nstep {self._loop_state.step} is saved; resume with: {resume_command()}")
        end_run(trainer, number)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self._is_on or self._taker is None:
            return
        taker, writer, loop_state = self._taker, self._taker.writer, self._loop_state
        if trainer.world_size > 1 and isinstance(exception, Exception):  # what follows may take seconds
            said = (str(exception).strip().splitlines() or ["no message"])[0]
            print(f"rank {trainer.global_rank}: {type(exception).__name__}: {said}", file=sys.stderr, flush=True)
        try:
            taker.finish_copy()
            writer.join()  # before the vote: rank 0's commit clears away what looks left over, votes too
            taker.report_failure()
            if loop_state is not None and self._can_save(trainer, loop_state):
                taker.save_last(trainer, loop_state)
            writer.wait()
        except SnapshotError as error:
            rank_zero_warn(str(error))
        self._close()
        if loop_state is None:  # nothing was trained, nothing is lost
            return
        report_last(writer.directory)

    def _can_save(self, trainer: Trainer, loop_state: LoopState) -> bool:
        """Whether no rank's state has changed since the last complete micro-batch."""
        is_unchanged = loop_state.step > self.resumed_step and self._changes.none_since_mark()
        if trainer.world_size == 1:
            return is_unchanged
        vote = f"step {loop_state.step}, batch {trainer.fit_loop.total_batch_idx}" if is_unchanged else None
        writer = self._opened().writer
        return all_agree(writer.directory, trainer.global_rank, trainer.world_size, vote, watched=writer.watched)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the trained state before other callbacks load averaged weights, sample, score and write."""
        if not self._is_on:
            return
        taker = self._opened()
        taker.finish_copy()
        self._poll.stop()
        states, self._final_state = self._final_state, None
        if states is not None and self._loop_state is not None and not taker.has_saved(self._loop_state):
            taker.save(trainer, self._loop_state, states, at_once=True)
            taker.writer.finish_copy()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on:
            return
        taker = self._opened()
        try:
            taker.writer.wait()
            if self._loop_state is not None and taker.has_saved(self._loop_state):
                self._final_facts = final_facts(trainer, pl_module)
        except SnapshotError as error:
            rank_zero_warn(str(error))
        if not self._is_over:
            taker.report_missing_best()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record in the last snapshot that the run has finished, once its final files are written."""
        facts, self._final_facts = self._final_facts, None
        if facts is not None and self._taker is not None and self._loop_state is not None and trainer.is_global_zero:
            self._taker.amend(self._loop_state, facts)
        self._close()

    def _close(self) -> None:
        self._poll.stop()
        if self._hooks is not None:
            self._hooks.remove()
        taker, self._taker, self._is_on = self._taker, None, False
        if taker is not None:
            taker.writer.close()

    def abandon(self) -> None:
        """Release the folder as a killed process does: nothing more is written for this run."""
        with contextlib.suppress(SnapshotError):
            self._close()

    def _opened(self) -> SnapshotTaker:
        assert self._taker is not None
        return self._taker
