"""ExactSnapshot: a training that was killed at any moment goes on as if it had not been."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc.checkpoint import SnapshotStore, find_snapshots
from lightning_aigc.checkpoint import loader as loaders
from lightning_aigc.checkpoint.agreement import all_agree
from lightning_aigc.checkpoint.arrival import Arrival, choose
from lightning_aigc.checkpoint.boundary import Boundary, run_ending
from lightning_aigc.checkpoint.config import training_config
from lightning_aigc.checkpoint.ending import final_facts, finished_sentence, is_over
from lightning_aigc.checkpoint.folders import name_of
from lightning_aigc.checkpoint.resume import LATEST, how_to_go_on, set_aside
from lightning_aigc.checkpoint.signals import StopSignals
from lightning_aigc.checkpoint.slurm import requeue, requeue_signal
from lightning_aigc.checkpoint.taker import SnapshotTaker
from lightning_aigc.checkpoint.trainer_state import Moment, OwnBuffers, State
from lightning_aigc.errors import ConfigError, SnapshotError

SHARDED = ("FSDP", "DeepSpeed", "ModelParallel")
Mode = Literal["min", "max"]
LAST_COMMIT_S = 30.0
"""How long a snapshot after an error may wait for the other ranks' files: one of them may be gone by then."""


class ExactSnapshot(Callback):
    """Every so often all that a training is made of, so that `lightning fit --resume` ends with the same bits.

    Works with any LightningModule and any loader. In Python: `trainer.fit(module, data, ckpt_path="latest")`, or the
    folder of one snapshot. The run itself does not change by a bit. docs/resume.md says what is kept, and what cannot
    be exact.

    Args:
        every_n_steps: Optimizer steps between two snapshots; 0 leaves them to the other reasons.
        keep_last: Snapshots to keep.
        every_n_seconds: A snapshot too when so much time has passed since the last one.
        on_signal: On SIGTERM, Ctrl-C and SLURM's requeue signal, a snapshot after the running batch, then the end.
        keep_best: A logged metric; the snapshot with its best value is kept beside the last ones.
        best_mode: Whether the best is the max or the min.
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
        """How long each snapshot of this fit kept training waiting."""
        self._forget()

    def _forget(self) -> None:
        self._is_on = False
        self._taker: SnapshotTaker | None = None
        self._boundary: Boundary | None = None
        self._signals = StopSignals()
        self._group: Any = None
        self._arriving: Arrival | None = None
        self._resumed_step = -1
        self._moment: Moment | None = None
        self._is_touched = True
        self._is_over = False
        self._ending: tuple[State, State] | None = None
        self._final_facts: dict[str, Any] | None = None

    # The fit's beginning ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if type(trainer.strategy).__name__.startswith(SHARDED):
            raise ConfigError(
                f"ExactSnapshot cannot take the sharded state of {type(trainer.strategy).__name__}; use"
                " trainer.strategy: ddp or npu_sparse, or leave ExactSnapshot out"
            )
        self._forget()
        self.blocked_s = []
        self._is_on = True
        # First, so that copies are complete before other callbacks touch a weight.
        trainer.callbacks = [self, *(c for c in trainer.callbacks if c is not self)]  # type: ignore[attr-defined]
        directory = trainer.strategy.broadcast(self.directory or str(Path(trainer.default_root_dir) / "snapshots"))
        store = SnapshotStore(
            directory, rank=trainer.global_rank, world_size=trainer.world_size, keep_last=self.keep_last
        )
        self._taker = SnapshotTaker(store, self.keep_best, self.best_mode, self.blocked_s)
        store.open()
        trainer.strategy.barrier("snapshots")
        self._boundary = Boundary(
            trainer,
            on_checkpoint=lambda path, stock: self._start(trainer, path, stock),
            on_loaders=lambda found: self._prepare_loaders(trainer, found),
            on_epoch=lambda: self._arrive(trainer),
            on_batch_over=lambda: self._after_batch(trainer),
            on_run=lambda stock: self._run(trainer, stock),
        )

    def _start(self, trainer: Trainer, path: Any, stock: Callable[[Any], None]) -> None:
        """In place of Lightning's look for a checkpoint: a snapshot, its own checkpoint, or nothing."""
        store = self._opened().store
        snapshot = choose(trainer, store.directory, path)
        if snapshot is None:
            stock(None if path == LATEST else path)
        else:
            self._arriving, self._resumed_step = Arrival(trainer, snapshot, is_named=path != LATEST), snapshot.step
            self._arriving.load()
            self._is_over = trainer.strategy.broadcast(is_over(snapshot, trainer, trainer.lightning_module))
            if self._is_over:
                rank_zero_info(finished_sentence(snapshot, trainer.default_root_dir))
        if trainer.is_global_zero and not self._is_over:
            aside = set_aside(store.directory, self._resumed_step)
            if aside is not None:
                rank_zero_info(
                    f"snapshots of an earlier run that lie beyond this one's start are in {aside} now; delete them when"
                    " they are no longer wanted, or stop and use --resume to go on from them"
                )
        trainer.strategy.barrier("snapshots")

    def _run(self, trainer: Trainer, stock: Callable[[], None]) -> None:
        """In place of the fit loop's `run`: that, nothing if the run is over, or what its end still has to do."""
        if self._is_over:
            return
        stock()
        if self._arriving is not None:  # Lightning saw that no step is left and has begun nothing
            run_ending(trainer)

    def _prepare_loaders(self, trainer: Trainer, found: list[Any]) -> list[Any]:
        ready = [one if isinstance(one, loaders.Resumable) else loaders.resumable(one) for one in found]
        for one in ready:
            sentence = loaders.what_may_differ(one)
            if sentence is not None:
                rank_zero_warn(sentence)
        if self._arriving is not None:
            self._arriving.place(ready)
        return ready

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on:
            return
        if self._arriving is not None:
            self._arriving.compare_config("after")
        self._own_buffers = OwnBuffers(pl_module)
        self._buffers = list(pl_module.buffers())
        self._opened().begin(trainer, training_config(trainer, pl_module), self._own_buffers)
        if trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo")
        if self.on_signal:
            launcher: Any = trainer.strategy.launcher
            self._signals = StopSignals(lambda: launcher.kill(signal.SIGKILL) if hasattr(launcher, "kill") else None)
            asked = requeue_signal(trainer)
            self._signals.install([signal.SIGTERM, signal.SIGINT, *([] if asked is None else [asked])])
            # Lightning asks the ranks about SIGTERM before every batch; `_after_batch` asks them about all signals.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def _arrive(self, trainer: Trainer) -> None:
        """Where the killed run was: between two micro-batches of this epoch, or after its last."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        moment, taker = arriving.finish(self._own_buffers), self._opened()
        if not trainer.fit_loop.epoch_loop.done:
            return
        self._moment, self._ending = moment, taker.take(trainer, moment)
        snapshot = arriving.snapshot
        is_own = snapshot.path == taker.store.directory / name_of(moment.step)
        if is_own and snapshot.world_size == trainer.world_size:
            taker.kept = moment

    # A batch ---------------------------------------------------------------------------------------------------------

    def _after_batch(self, trainer: Trainer) -> None:
        taker = self._opened()
        taker.finish_copy()
        self._moment, self._is_touched = Moment.take(trainer), False
        self._versions = [buffer._version for buffer in self._buffers]
        number, is_late = self._agree()
        if number:
            self._stop(trainer, number)
        every, step = self.every_n_steps, trainer.global_step
        if is_late or taker.is_torn or (every and step // every > taker.last_step // every):
            taker.save(trainer, self._moment)
        if trainer.fit_loop.epoch_loop.done:
            self._ending = taker.take(trainer, self._moment)

    def _agree(self) -> tuple[int, bool]:
        """The signal that some rank got, 0 for none, and whether rank 0 says that it is time for a snapshot."""
        last_time = self._opened().last_time
        is_time = self.every_n_seconds is not None and time.monotonic() - last_time >= self.every_n_seconds
        if self._group is None:
            return self._signals.received, is_time
        if not self.on_signal and self.every_n_seconds is None:
            return 0, False
        is_first = dist.get_rank() == 0
        said = torch.tensor([self._signals.received, int(is_time and is_first)], dtype=torch.int32)
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group)
        return int(said[0]), bool(said[1])

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._moment is not None and self._moment.is_window_open:
            self._is_touched = True  # its gradients are in the making

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._is_touched = True
        self._finish_copy()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._finish_copy()

    def wait(self) -> None:
        """Return when the last snapshot of this run is durable; raises what its writing raised."""
        self._opened().store.wait()

    def _finish_copy(self) -> None:
        if self._taker is not None:
            self._taker.finish_copy()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_touched = True

    # Ends ------------------------------------------------------------------------------------------------------------

    def _stop(self, trainer: Trainer, number: int) -> None:
        """A snapshot of now, durable; then the end that the signal asks for."""
        taker = self._opened()
        assert self._moment is not None
        taker.save(trainer, self._moment, at_once=True)
        self.wait()
        trainer.strategy.barrier("snapshot")
        self._close()
        rank_zero_info(f"\nstep {self._moment.step} is kept whole; go on with: {how_to_go_on()}")
        if trainer.is_global_zero and number not in (signal.SIGINT, signal.SIGTERM):
            requeue()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        # Lightning's launcher kills rank 0 as soon as another rank ends with an error.
        raise SIGTERMException(128 + number if trainer.is_global_zero else 0)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self._is_on or self._taker is None:
            return
        taker, store, moment = self._taker, self._taker.store, self._moment
        try:
            taker.finish_copy()
            taker.say_failure()
            if moment is not None and self._can_save(trainer, moment):
                store.commit_timeout_s = min(store.commit_timeout_s, LAST_COMMIT_S)
                taker.save(trainer, moment, at_once=True)
            store.wait()
        except SnapshotError as error:
            rank_zero_warn(str(error))
        self._close()
        if moment is None:  # nothing was trained, nothing is lost
            return
        last = next(iter(find_snapshots(store.directory)), None)
        if last is None:
            rank_zero_info("there is no snapshot to go on from")
        else:
            rank_zero_info(f"the last snapshot is of step {last.step}; go on from it with: {how_to_go_on()}")

    def _can_save(self, trainer: Trainer, moment: Moment) -> bool:
        """Whether nothing of the state has changed since the last whole micro-batch, on any rank."""
        unchanged = self._versions == [buffer._version for buffer in self._buffers]
        is_as_it_was = moment.step > self._resumed_step and not self._is_touched and unchanged
        if trainer.world_size == 1:
            return is_as_it_was
        vote = f"step {moment.step}, batch {trainer.fit_loop.total_batch_idx}" if is_as_it_was else None
        return all_agree(self._opened().store.directory, trainer.global_rank, trainer.world_size, vote)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A snapshot of the trained state, before others put averages into the weights, draw, score and write."""
        if not self._is_on:
            return
        taker = self._opened()
        taker.finish_copy()
        self._signals.remove()
        states, self._ending = self._ending, None
        if states is not None and self._moment is not None and (taker.kept is not self._moment or taker.is_torn):
            taker.save(trainer, self._moment, states, at_once=True)
            taker.store.finish_copy()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on:
            return
        taker = self._opened()
        try:
            taker.store.wait()
            if self._moment is not None and taker.kept is self._moment:
                self._final_facts = final_facts(trainer, pl_module)
        except SnapshotError as error:
            rank_zero_warn(str(error))
        if self.keep_best is not None and taker.best is None and not self._is_over:
            rank_zero_warn(
                f"ExactSnapshot.keep_best: {self.keep_best} was never logged, so no best snapshot was kept; logged were"
                f" {', '.join(taker.logged) or 'no metrics'}"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The last snapshot says that the run is finished, once all that its end writes is written."""
        facts, self._final_facts = self._final_facts, None
        if facts is not None and self._taker is not None and self._moment is not None and trainer.is_global_zero:
            try:
                self._taker.store.amend(self._moment.step, facts)
            except SnapshotError as error:
                rank_zero_warn(str(error))
        self._close()

    def _close(self) -> None:
        self._signals.remove()
        if self._boundary is not None:
            self._boundary.remove()
        taker, self._taker, self._is_on = self._taker, None, False
        if taker is not None:
            taker.store.close()

    def abandon(self) -> None:
        """Let go of the folder as a killed process does: nothing more is written for this run."""
        with contextlib.suppress(SnapshotError):
            self._close()

    def _opened(self) -> SnapshotTaker:
        assert self._taker is not None
        return self._taker
