"""A rank that is killed while a snapshot is written ends the others within seconds, with the error printed at once."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from fakes.processes.ranks import run_ranks
from fakes.runs.trainings import Regression, make_batches
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.checkpoint import coordination
from lightning_aigc.checkpoint.files import commit

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Killed(Callback):
    """Kills the rank as soon as it has begun to write the snapshot of step 2, whose last file it never writes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if trainer.global_rank != self.rank:
            return
        write = commit.Attempt.write

        def killed(attempt: commit.Attempt) -> int:
            if attempt.step < 2:
                return write(attempt)
            attempt._folder().mkdir(exist_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        commit.Attempt.write = killed  # type: ignore[method-assign]


def train(rank: int, folder: str, strategy: str, victim: int) -> tuple[float, str]:
    warnings.simplefilter("ignore")
    with Path(folder, f"said{rank}").open("w", encoding="utf-8") as said:
        os.dup2(said.fileno(), 2)
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=50, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[ExactSnapshot(every_n_steps=1), Killed(victim)],
    )  # fmt: skip
    start = time.monotonic()
    try:
        trainer.fit(Regression(), DataLoader(make_batches(), batch_size=None))
    except RuntimeError as error:
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return time.monotonic() - start, "nothing"


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [("npu_sparse", 0)]
    + [
        pytest.param(strategy, victim, marks=pytest.mark.long)
        for strategy in ("ddp", "npu_sparse", "zero_1", "zero_2", "zero_3")
        for victim in (0, 1)
        if (strategy, victim) != ("npu_sparse", 0)
    ],
)
def test_the_other_rank_ends_within_seconds(tmp_path: Path, strategy: str, victim: int) -> None:
    other = 1 - victim
    found = run_ranks(train, 2, tmp_path, str(tmp_path), strategy, victim, gloo=False, timeout_s=60, may_die=[victim])
    seconds, error = found[other]
    assert error != "nothing" and seconds < 20
    assert f"error: rank {other} " in (tmp_path / f"said{other}").read_text()


def test_a_lock_shows_that_its_rank_is_gone(tmp_path: Path) -> None:
    locks = [coordination.FolderLock(tmp_path), coordination.RankLock(tmp_path, 1)]
    assert coordination.visible_ranks(tmp_path, 3) == {0, 1}
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:  # a data worker has none of the locks
        os.write(write, b".")
        time.sleep(5)
        os._exit(0)
    os.read(ready, 1)
    for lock in locks:
        lock.release()
    assert coordination.is_gone(tmp_path, 0) and coordination.is_gone(tmp_path, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_rank_that_is_gone_has_voted_against(tmp_path: Path) -> None:
    coordination.FolderLock(tmp_path)
    coordination.RankLock(tmp_path, 1).release()
    start = time.monotonic()
    assert not coordination.all_agree(tmp_path, 0, 2, "step 4", wait_s=30, watched=[0, 1])
    assert time.monotonic() - start < 1
