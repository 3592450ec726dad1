"""ExactSnapshot: a training that was killed at any moment goes on as if it had not been."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc.checkpoint import Snapshot, SnapshotStore, find_snapshots, newest_complete
from lightning_aigc.checkpoint import loader as loaders
from lightning_aigc.checkpoint import trainer_state as states
from lightning_aigc.checkpoint.boundary import Boundary
from lightning_aigc.checkpoint.config import differences, training_config
from lightning_aigc.checkpoint.folders import name_of, remove
from lightning_aigc.checkpoint.other_ranks import for_other_ranks
from lightning_aigc.checkpoint.resume import (
    LATEST,
    how_to_go_on,
    is_requeued,
    is_snapshot,
    set_aside,
    what_is_not_exact,
)
from lightning_aigc.checkpoint.signals import StopSignals
from lightning_aigc.errors import ConfigError, SnapshotError

SHARDED = ("FSDP", "DeepSpeed", "ModelParallel")
Mode = Literal["min", "max"]


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
        self._store: SnapshotStore | None = None
        self._boundary: Boundary | None = None
        self._signals = StopSignals()
        self._group: Any = None
        self._arriving: dict[str, Any] | None = None
        self._resumed_step = -1
        self._moment: states.Moment | None = None
        self._is_touched = True
        self._last_step, self._last_time = 0, 0.0
        self._late: dict[int, tuple[Tensor, int]] = {}
        self._may_be_late = True
        self._is_torn = False
        self._ending: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._best: float | None = None

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
        self._store = SnapshotStore(
            directory, rank=trainer.global_rank, world_size=trainer.world_size, keep_last=self.keep_last
        )
        self._store.open()
        trainer.strategy.barrier("snapshots")
        self._boundary = Boundary(
            trainer,
            on_checkpoint=lambda path, stock: self._start(trainer, path, stock),
            on_loaders=lambda found: self._prepare_loaders(trainer, found),
            on_epoch=lambda: self._arrive(trainer),
            on_batch_over=lambda: self._after_batch(trainer),
        )

    def _start(self, trainer: Trainer, path: Any, stock: Callable[[Any], None]) -> None:
        """In place of Lightning's look for a checkpoint: a snapshot, its own checkpoint, or nothing."""
        store = self._opened()
        snapshot = self._choose(trainer, path)
        if snapshot is None:
            stock(None if path == LATEST else path)
        else:
            self._load(trainer, snapshot, is_named=path != LATEST)
        self._resumed_step = -1 if snapshot is None else snapshot.step
        if trainer.is_global_zero:
            aside = set_aside(store.directory, self._resumed_step)
            if aside is not None:
                rank_zero_info(
                    f"snapshots of an earlier run that lie beyond this one's start are in {aside} now; delete them when"
                    " they are no longer wanted, or stop and use --resume to go on from them"
                )
        trainer.strategy.barrier("snapshots")

    def _choose(self, trainer: Trainer, path: Any) -> Snapshot | None:
        store = self._opened()
        if is_snapshot(path):
            snapshot = Snapshot.at(Path(path))
            snapshot.verify()
            return snapshot
        if path != LATEST and not (path is None and is_requeued()):
            return None
        found = newest_complete(store.directory, rank_zero_warn) if trainer.is_global_zero else None
        chosen = trainer.strategy.broadcast(None if found is None else str(found.path))
        if chosen is None:
            rank_zero_info(f"nothing to resume in {store.directory}: the run starts at its beginning")
            return None
        return found or Snapshot.at(Path(chosen))

    def _load(self, trainer: Trainer, snapshot: Snapshot, *, is_named: bool) -> None:
        rank, strategy = trainer.global_rank, trainer.strategy
        for note in what_is_not_exact(snapshot, trainer.world_size, _device(trainer)):
            rank_zero_warn(f"not bit for bit the run of the snapshot: {note}")
        if snapshot.world_size == trainer.world_size:
            own = snapshot.rank(rank)
        else:
            own = for_other_ranks(snapshot, rank, trainer.world_size)
        self._arriving = own
        checkpoint = snapshot.shared() | own["checkpoint"]
        loops: dict[str, Any] = trainer._checkpoint_connector._get_loops_state_dict()
        checkpoint["loops"] = loops | {"fit_loop": own["moment"]["loops"]}
        checkpoint = _pl_migrate_checkpoint(checkpoint, str(snapshot.path))
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint, connector._ckpt_path = checkpoint, str(snapshot.path)
        if own["strategy"] is not None and hasattr(strategy, "load_snapshot_state"):
            strategy.load_snapshot_state(lambda k: snapshot.rank(k)["strategy"], snapshot.world_size)
        self._was = snapshot.facts.get("config", {})
        self._must_match = not is_named
        self._compare_config(trainer, "before")
        rank_zero_info(f"going on from {snapshot.path}: step {snapshot.step}")

    def _compare_config(self, trainer: Trainer, when: Literal["before", "after"]) -> None:
        """Before the model is loaded what stands in the config; after it the optimizers, which are made last.

        Raises: ConfigError with each key that differs, unless the user named the snapshot.
        """
        module = trainer.lightning_module
        lines = [
            line
            for line in differences(self._was, training_config(trainer, module))
            if line.startswith("optimizer") == (when == "after")
        ]
        if not lines:
            return
        text = "the snapshot is of a run with another configuration:\n  " + "\n  ".join(lines)
        if self._must_match:
            raise ConfigError(
                f"{text}\nset them as they were, or, to go on with them all the same, name the snapshot:"
                f" --ckpt_path {trainer._checkpoint_connector._ckpt_path}"
            )
        rank_zero_warn(text)

    def _prepare_loaders(self, trainer: Trainer, found: list[Any]) -> list[Any]:
        ready = [one if isinstance(one, loaders.Resumable) else loaders.resumable(one) for one in found]
        for one in ready:
            sentence = loaders.what_may_differ(one)
            if sentence is not None:
                rank_zero_warn(sentence)
        if self._arriving is not None:
            moment = self._arriving["moment"]
            for one, place in zip(ready, moment["places"], strict=True):
                if isinstance(one, loaders.Resumable):
                    known = place is not None
                    one.go_to(loaders.from_plain(place) if known else one.place_after(moment["cycle"]["index"]))
        return ready

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on:
            return
        self._config = training_config(trainer, pl_module)
        if self._arriving is not None:
            self._compare_config(trainer, "after")
        self._own_buffers = states.OwnBuffers(pl_module)
        self._buffers = list(pl_module.buffers())
        self._last_step, self._last_time = trainer.global_step, time.monotonic()
        if trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo")
        if self.on_signal:
            launcher: Any = trainer.strategy.launcher
            self._signals = StopSignals(lambda: launcher.kill(signal.SIGKILL) if hasattr(launcher, "kill") else None)
            self._signals.install(_signals_of(trainer))
            # Lightning asks the ranks about SIGTERM before every batch; `_after_batch` asks them about all signals.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def _arrive(self, trainer: Trainer) -> None:
        """Where the killed run was: between two micro-batches of this epoch."""
        own, self._arriving = self._arriving, None
        if own is None:
            return
        module = trainer.lightning_module
        if getattr(trainer.strategy, "ranks_differ", False):  # DDP has given all ranks rank 0's
            module.load_state_dict(own["checkpoint"]["state_dict"], strict=False)
        states.restore_gradients(module, own["gradients"])
        states.restore_training_modes(trainer, own["in_eval"])
        self._own_buffers.restore(module, own["buffers"])
        trainer.accumulate_grad_batches = own["accumulate_grad_batches"]
        moment = states.Moment.from_plain(own["moment"], trainer.strategy.root_device)
        moment.restore(trainer)

    # A batch ---------------------------------------------------------------------------------------------------------

    def _after_batch(self, trainer: Trainer) -> None:
        self._finish_copy()
        self._moment, self._is_touched = states.Moment.take(trainer), False
        self._versions = [buffer._version for buffer in self._buffers]
        number, is_late = self._agree()
        if number:
            self._stop(trainer, number)
        every, step = self.every_n_steps, trainer.global_step
        if is_late or self._is_torn or (every and step // every > self._last_step // every):
            self._save(trainer, self._moment)
        if trainer.fit_loop.epoch_loop.done:
            self._ending = self._state_of(trainer, self._moment)

    def _agree(self) -> tuple[int, bool]:
        """The signal that some rank got, 0 for none, and whether rank 0 says that it is time for a snapshot."""
        is_time = self.every_n_seconds is not None and time.monotonic() - self._last_time >= self.every_n_seconds
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

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_touched = True

    # Saving ----------------------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, moment: states.Moment, *, at_once: bool = False) -> None:
        store = self._opened()
        self._say_failure(store)
        start = time.perf_counter()
        own, shared = self._state_of(trainer, moment)
        late = {} if at_once or not self._may_be_late else states.late_tensors(trainer)
        facts = self._facts(trainer, moment)
        store.save(moment.step, own, shared if trainer.is_global_zero else None, facts, late=late.keys())
        self._late = {address: (tensor, tensor._version) for address, tensor in late.items()}
        self.blocked_s.append(time.perf_counter() - start)
        self._last_step, self._last_time, self._is_torn = moment.step, time.monotonic(), False

    def _state_of(self, trainer: Trainer, moment: states.Moment) -> tuple[dict[str, Any], dict[str, Any]]:
        """What this rank has of its own, and what all have alike."""
        strategy, module = trainer.strategy, trainer.lightning_module
        with strategy.left_apart() if hasattr(strategy, "left_apart") else contextlib.nullcontext():
            checkpoint = states.checkpoint_of(trainer)
        differ = bool(getattr(strategy, "ranks_differ", False))
        own = {
            "moment": moment.to_plain(),
            "gradients": states.gradients(module) if moment.is_window_open else {},
            "buffers": self._own_buffers.changed(module, checkpoint["state_dict"] if trainer.is_global_zero else {}),
            "in_eval": states.training_modes(trainer),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "strategy": strategy.snapshot_state() if hasattr(strategy, "snapshot_state") else None,
            "checkpoint": checkpoint if differ else states.of_this_rank(trainer, checkpoint),
        }
        return own, {} if differ else checkpoint

    def _facts(self, trainer: Trainer, moment: states.Moment) -> dict[str, Any]:
        facts: dict[str, Any] = {"config": self._config, "device": _device(trainer)}
        if self.keep_best is not None:
            value = moment.metrics["callback"].get(self.keep_best)
            facts["metric"] = None if value is None else float(value)
            self._protect_best(moment.step, facts["metric"])
        return facts

    def _protect_best(self, step: int, value: float | None) -> None:
        if value is None or value != value:
            return
        is_better = self._best is None or (value < self._best if self.best_mode == "min" else value > self._best)
        if is_better:
            self._best, self._opened().protected = value, {step}

    def _finish_copy(self) -> None:
        """Before anything may write a weight: the background copy is complete, and nothing was written meanwhile."""
        if not self._late or self._store is None:
            return
        start = time.perf_counter()
        self._store.finish_copy()
        late, self._late = self._late, {}
        self.blocked_s[-1] += time.perf_counter() - start
        if any(tensor._version != version for tensor, version in late.values()):
            self._may_be_late, self._is_torn = False, True
            self._store.wait()
            if self._store.rank == 0:
                remove(self._store.directory / name_of(self._last_step))
            rank_zero_warn(
                "a trained weight changed outside of the optimizer's step while it was being copied for a snapshot;"
                " from here on snapshots copy all weights before training goes on"
            )

    def _say_failure(self, store: SnapshotStore) -> None:
        error = store.error()
        if error is not None:
            rank_zero_warn(str(error))

    # Ends ------------------------------------------------------------------------------------------------------------

    def _stop(self, trainer: Trainer, number: int) -> None:
        """A snapshot of now, durable; then the end that the signal asks for."""
        store = self._opened()
        assert self._moment is not None
        self._save(trainer, self._moment, at_once=True)
        store.wait()
        trainer.strategy.barrier("snapshot")
        self._close()
        rank_zero_info(f"\nstep {self._moment.step} is kept whole; go on with: {how_to_go_on()}")
        if trainer.is_global_zero and number not in (signal.SIGINT, signal.SIGTERM):
            _requeue()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        # Lightning's launcher kills rank 0 as soon as another rank ends with an error.
        raise SIGTERMException(128 + number if trainer.is_global_zero else 0)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self._is_on or self._store is None:
            return
        store, moment = self._store, self._moment
        try:
            self._finish_copy()
            self._say_failure(store)
            if moment is not None and moment.step > self._resumed_step and self._is_as_it_was(trainer):
                self._save(trainer, moment, at_once=True)
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

    def _is_as_it_was(self, trainer: Trainer) -> bool:
        """Whether nothing of the state has changed since the last whole micro-batch. Ranks that wait for this one in a
        collective cannot take part, so with several there is no snapshot."""
        unchanged = self._versions == [buffer._version for buffer in self._buffers]
        return trainer.world_size == 1 and not self._is_touched and unchanged

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on:
            return
        self._finish_copy()
        self._signals.remove()
        # On the host before others put averages into the weights, written when their files are: see on_fit_end.
        self._ending = None if self._ending is None else _copied(self._ending)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A snapshot of the finished training: it says that the final files are written, and more steps can follow."""
        if not self._is_on:
            return
        store = self._opened()
        self._say_failure(store)
        if self._ending is not None and self._moment is not None:
            own, shared = self._ending
            facts = self._facts(trainer, self._moment) | {"is_finished": True}
            store.save(self._moment.step, own, shared if trainer.is_global_zero else None, facts)
        try:
            store.wait()
        except SnapshotError as error:
            rank_zero_warn(str(error))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._signals.remove()
        if self._boundary is not None:
            self._boundary.remove()
        store, self._store, self._is_on = self._store, None, False
        if store is not None:
            store.close()

    def abandon(self) -> None:
        """Let go of the folder as a killed process does: nothing more is written for this run."""
        with contextlib.suppress(SnapshotError):
            self._close()

    def _opened(self) -> SnapshotStore:
        assert self._store is not None
        return self._store


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return type(value)(_copied(one) for one in value) if isinstance(value, (list, tuple)) else value


def _device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    return device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def _signals_of(trainer: Trainer) -> list[int]:
    numbers = [signal.SIGTERM, signal.SIGINT]
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        numbers.append(environment.requeue_signal or signal.SIGUSR1)
    return [int(number) for number in numbers]


def _requeue() -> None:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array is not None else os.environ["SLURM_JOB_ID"]
    if not re.fullmatch("[0-9_]+", job):
        raise SnapshotError(f"SLURM's job id is {job!r}, wanted digits; requeue it by hand")
    done = subprocess.run(["scontrol", "requeue", job], check=False)
    rank_zero_info(f"SLURM job {job} is {'requeued' if done.returncode == 0 else 'not requeued: scontrol failed'}")
