"""SLURM: the signal that says a job's time is over, its requeue, and whether this is a job that was requeued."""

from __future__ import annotations

import os
import re
import signal
import subprocess

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_aigc.errors import SnapshotError


def requeue_signal(trainer: Trainer) -> int | None:
    """The number of the signal that asks for a requeue; None where nothing does."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return int(environment.requeue_signal or signal.SIGUSR1)
    return None


def is_requeued() -> bool:
    """Whether SLURM has started this job again: the same command then goes on by itself."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def requeue() -> None:
    """Put this job, or this task of an array of jobs, back into the queue, and say whether that worked.

    Raises: SnapshotError for a job id that is none.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array is not None else os.environ["SLURM_JOB_ID"]
    if not re.fullmatch("[0-9_]+", job):
        raise SnapshotError(f"SLURM's job id is {job!r}, wanted digits; requeue it by hand")
    done = subprocess.run(["scontrol", "requeue", job], check=False)
    rank_zero_info(f"SLURM job {job} is {'requeued' if done.returncode == 0 else 'not requeued: scontrol failed'}")
