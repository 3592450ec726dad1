"""Runs that are told to end: stop signals, and SLURM's requeue."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from lightning_aigc._lightning import SIGTERMException, SLURMEnvironment, Trainer, rank_zero_info
from lightning_aigc.checkpoint.lightning_loops import keep_handlers
from lightning_aigc.errors import SnapshotError

if sys.platform == "win32":
    AT_ONCE = signal.SIGTERM  # there it ends a process without its consent
else:
    AT_ONCE = signal.SIGKILL


class StopSignals:
    """Signal handlers of one training: the first signal is recorded, a second Ctrl-C ends the process at once.

    Args: at_once: what a second Ctrl-C does before the process ends.
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        self.received = 0
        """Number of the first signal; 0 before any."""
        self._at_once = at_once
        self._previous: dict[int, Any] = {}

    def install(self, numbers: Iterable[int]) -> None:
        """Install the handlers; does nothing outside of the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.received = 0
        for number in numbers:
            self._previous[number] = signal.signal(number, self._record)

    def remove(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _record(self, number: int, _: Any) -> None:
        if self.received and number == signal.SIGINT:
            self._at_once()
            os._exit(128 + number)
        if not self.received:
            self.received = number
            again = "; Ctrl-C once more ends at once" if number == signal.SIGINT else ""
            # print() may be what was interrupted
            os.write(2, _line(number, again))


class RequeueOutsideLoop(StopSignals):
    """Handler of SLURM's requeue signal before and after the training loop: nothing is lost there that a snapshot has.

    It requeues the job and ends the run. Lightning's own handler, which would write a checkpoint that later runs in the
    folder load unasked, is not installed where there is one already.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    def remove(self) -> None:
        """Restore the previous handlers, also where Lightning restores those of the fit's start later."""
        keep_handlers(self._trainer, self._previous)
        super().remove()

    def _record(self, number: int, _: Any) -> None:
        if not self.received:
            self.received = number
            os.write(2, f"\n{signal.Signals(number).name}: no batch runs, so the run ends at once\n".encode())
            end_run(self._trainer, number)


def _line(number: int, again: str) -> bytes:
    return f"\n{signal.Signals(number).name}: a snapshot follows this batch, then the run ends{again}\n".encode()


def requeue_signal(trainer: Trainer) -> int | None:
    """The number of the signal that asks for a requeue; None outside of SLURM or without auto_requeue."""
    if sys.platform == "win32":
        return None
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return int(environment.requeue_signal or signal.SIGUSR1)
    return None


def is_requeued() -> bool:
    """Whether SLURM has started this job again; the same command then resumes without being asked."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def requeue() -> None:
    """Requeue this job, or this task of a job array, and report whether that worked.

    Raises: SnapshotError if SLURM's job id is not a number.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array is not None else os.environ["SLURM_JOB_ID"]
    if not re.fullmatch("[0-9_]+", job):
        raise SnapshotError(f"SLURM's job id is {job!r}, wanted digits; requeue it by hand")
    if shutil.which("scontrol") is None:
        rank_zero_info(f"SLURM job {job} is not requeued: no scontrol here; run `scontrol requeue {job}` on the host")
        return
    done = subprocess.run(["scontrol", "requeue", job], check=False)
    rank_zero_info(f"SLURM job {job} is {'requeued' if done.returncode == 0 else 'not requeued: scontrol failed'}")


def end_run(trainer: Trainer, number: int) -> None:
    """Requeue the job if this signal asks for it, and raise what ends the run. Every rank calls it."""
    if trainer.is_global_zero and number not in (signal.SIGINT, signal.SIGTERM):
        requeue()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    # Lightning's launcher kills rank 0 as soon as another rank ends with an error.
    raise SIGTERMException(128 + number if trainer.is_global_zero else 0)


class StopPoll:
    """Asks all ranks after each micro-batch which signal arrived, and rank 0 whether a timed snapshot is due.

    Args:
        on_signal: Whether to install signal handlers; without them no signal is ever reported.
        every_n_seconds: Seconds between two timed snapshots; None for no timed ones.
    """

    def __init__(self, on_signal: bool, every_n_seconds: float | None) -> None:
        self._on_signal, self._every_n_seconds = on_signal, every_n_seconds
        self._signals = StopSignals()
        self._outside: StopSignals | None = None
        self._group: Any = None

    def watch(self, trainer: Trainer) -> None:
        """Answer SLURM's requeue signal from now on, until `start` and again after `stop`."""
        number = requeue_signal(trainer) if self._on_signal else None
        if number is not None:
            self._outside = RequeueOutsideLoop(trainer)
            self._outside.install([number])

    def start(self, trainer: Trainer) -> None:
        """Install the handlers and, on several ranks, make the process group; every rank calls it."""
        if trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=getattr(trainer.strategy, "_timeout", None))
        if self._on_signal:
            launcher: Any = trainer.strategy.launcher
            self._signals = StopSignals(lambda: launcher.kill(AT_ONCE) if hasattr(launcher, "kill") else None)
            requeue_number = requeue_signal(trainer)
            extra = [] if requeue_number is None else [requeue_number]
            self._signals.install([signal.SIGTERM, signal.SIGINT, *extra])

    def ask(self, last_time: float) -> tuple[int, bool]:
        """Return the signal that any rank received, 0 for none, and whether a timed snapshot is due.

        Args: last_time: `time.monotonic()` of the last snapshot.
        """
        is_due = self._every_n_seconds is not None and time.monotonic() - last_time >= self._every_n_seconds
        if self._group is None:
            return self._signals.received, is_due
        if not self._on_signal and self._every_n_seconds is None:
            return 0, False
        is_first = dist.get_rank() == 0
        answer = torch.tensor([self._signals.received, int(is_due and is_first)], dtype=torch.int32)
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=self._group)
        return int(answer[0]), bool(answer[1])

    @property
    def has_signal(self) -> bool:
        """Whether a signal has arrived at this rank."""
        return bool(self._signals.received)

    def stop(self) -> None:
        """Restore the signal handlers before `start`."""
        self._signals.remove()

    def close(self) -> None:
        """Restore the signal handlers before `watch`."""
        self.stop()
        if self._outside is not None:
            self._outside.remove()
