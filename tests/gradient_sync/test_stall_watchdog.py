"""A stall: each rank writes where it waits, one line names who does not answer, and the run goes on."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakes.processes.given_gradients import Training
from fakes.processes.ranks import run_ranks
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync import GradientCompressor
from lightning_aigc.gradient_sync.watch.stall_watchdog import StallWatchdog, default_after_s
from lightning_aigc_kernels.quantize_blocks import part_kernel

AFTER_S = 1.0


def oversleep(seconds: float) -> None:
    time.sleep(seconds)


def stalled(rank: int, how: str, mode: str, folder: str) -> str:
    """Output of this rank in a run in which rank 1 comes late to the third step."""
    part_kernel(torch.device("cpu"))  # loading Numba takes about as long as a stall here
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        run = Training({"bucket_cap_mb": 0.001}, mode=mode, bucket_mb=0.002, stall_after_s=AFTER_S, stall_folder=folder)
        run.steps(rank, [0, 1])
        if rank == 1 and how == "asleep":
            oversleep(3 * AFTER_S)
        elif rank == 1:
            subprocess.Popen(["sh", "-c", f"sleep {3 * AFTER_S}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        run.steps(rank, [2, 3])
        time.sleep(AFTER_S / 2)  # for the line that steps finish again
        run.compressor.close()
    return said.getvalue()


@pytest.mark.parametrize("mode", ["int3", "dense", "local"])
def test_every_rank_writes_where_it_waits_and_one_line_says_so(mode: str, tmp_path: Path) -> None:
    first, second = run_ranks(stalled, 2, tmp_path, "asleep", mode, str(tmp_path / "stalled"))
    assert second == ""
    line, after = first.splitlines()
    assert re.match(
        r"npu_sparse: no step has finished for \d s: rank 0 at step 3, in \S+ \S+; rank 1 at step 3, in ", line
    )
    assert "test_stall_watchdog.py" in line and " oversleep; " in line
    assert f"stands in {tmp_path}/stalled/rank*.txt" in line and "at its timeout of 0:30:00" in line
    assert re.fullmatch(r"npu_sparse: steps finish again: step \d is next", after)
    waits, sleeps = ((tmp_path / "stalled" / f"rank{rank}.txt").read_text() for rank in range(2))
    assert "rank 0 of 2 on " in waits and "step 2 of gradient sync" in waits
    assert re.search(r"collective \d+ of hop \d: \w+ of \w+, \d+ bytes, started", waits) or mode == "local"
    assert "in oversleep" in sleeps and "in oversleep" not in waits  # faulthandler's stacks
    assert "  rank 1: step 3, in test_stall_watchdog.py" in waits
    if mode == "int3":
        assert "submitted and not reduced: unit " in waits
        assert "wait for this rank's backward pass" in sleeps and "submitted and not" not in sleeps


def test_a_stopped_rank_is_the_one_that_gives_no_answer(tmp_path: Path) -> None:
    first, second = run_ranks(stalled, 2, tmp_path, "stopped", "int3", str(tmp_path / "stalled"))
    assert "no answer from rank 1, so look there first (stopped, killed or out of reach)" in first
    assert re.search(r"npu_sparse: rank 1 stood still for [23] s: its process was stopped", second)
    assert "no step has finished" not in second
    assert not (tmp_path / "stalled" / "rank1.txt").exists()


def steady(rank: int, folder: str) -> str:
    part_kernel(torch.device("cpu"))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        run = Training(mode="int3", stall_after_s=AFTER_S, stall_folder=folder)
        for number in range(8):
            run.steps(rank, [number])
            time.sleep(AFTER_S / 3)
        run.compressor.close()
    return said.getvalue()


def test_a_run_whose_steps_finish_says_and_writes_nothing(tmp_path: Path) -> None:
    assert run_ranks(steady, 2, tmp_path, str(tmp_path / "stalled")) == ["", ""]
    assert not (tmp_path / "stalled").exists()


def test_a_step_that_finishes_while_the_others_are_asked_is_not_reported(tmp_path: Path) -> None:
    said: list[str] = []
    watchdog = StallWatchdog(AFTER_S, tmp_path, 0, 2, timedelta(minutes=30), say=said.append)
    board = SimpleNamespace(post=lambda where: None, clear=lambda: said.append("cleared"), lines=lambda posts: [])

    def wait(seconds: float) -> dict[int, str]:
        watchdog.progress(7)
        return {0: "step 7"}

    board.wait_for_posts = wait
    watchdog._board = board  # type: ignore[assignment]
    assert not watchdog._report(watchdog._progress_at) and said == ["cleared"]


def test_one_rank_is_not_watched_and_a_negative_time_is_refused(tmp_path: Path) -> None:
    watchdog = StallWatchdog(0.1, tmp_path / "stalled", 0, 1, timedelta(seconds=1))
    watchdog.start()
    time.sleep(0.3)
    watchdog.close()
    assert not (tmp_path / "stalled").exists()
    with pytest.raises(ConfigError, match="0 to turn it off; got -1"):
        StallWatchdog(-1, None, 0, 2, timedelta(seconds=1))
    assert default_after_s(timedelta(minutes=30)) == 600
    assert GradientCompressor(timeout=timedelta(minutes=3))._stall_after_s == 60


def watched_by_callback(rank: int, folder: str) -> str:
    """A stall under plain ddp, with the callback."""
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_aigc.callbacks import StallWatch

    class Sleeper(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1 and batch_idx == 2:
                oversleep(3 * AFTER_S)
            return super().training_step(batch, batch_idx)

    said = io.StringIO()
    torch.manual_seed(0)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with contextlib.redirect_stderr(said):
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_steps=4, limit_val_batches=0, default_root_dir=folder,
            callbacks=StallWatch(AFTER_S), enable_model_summary=False, **quiet,
        )  # fmt: skip
        trainer.fit(Sleeper())
    sys.stderr.flush()
    return said.getvalue()


@pytest.mark.filterwarnings("ignore")
def test_the_callback_watches_any_strategy(tmp_path: Path) -> None:
    first, _ = run_ranks(watched_by_callback, 2, tmp_path, str(tmp_path / "run"), gloo=False)
    (line,) = [line for line in first.splitlines() if "no step has finished" in line]
    assert " oversleep; " in line
    assert "in oversleep" in (tmp_path / "run" / "stalled" / "rank1.txt").read_text()
