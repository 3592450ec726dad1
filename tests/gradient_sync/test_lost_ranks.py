"""A rank that dies or hangs is an error on the others, and never a hang."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fakes.processes.given_gradients import Training, refusal
from fakes.processes.ranks import run_ranks
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync import SyncError
from lightning_aigc.gradient_sync.transport.process_groups import errors_as_warnings, reason_of, say_error, was_said

SHORT = timedelta(seconds=3)
ENDS = ("int3", "dense", "sparse", "local", "inline")


def left_alone(rank: int, how: str) -> Any:
    """The error of rank 0 in the step that rank 1 never takes, and after how many seconds."""
    options: dict[str, Any] = {"mode": "int3", "overlap": False} if how == "inline" else {"mode": how}
    run = Training({"bucket_cap_mb": 0.001}, **options, bucket_mb=0.002, timeout=SHORT)
    run.steps(rank, [0, 1])
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        run.steps(rank, [2, 3])
    except SyncError as error:
        return str(error), time.monotonic() - start, refusal(run.compressor.state_dict)
    return None


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_dies_is_an_error_on_the_others_and_never_a_hang(how: str, tmp_path: Path) -> None:
    (said, seconds, afterwards), _ = run_ranks(left_alone, 2, tmp_path, how, may_die=[1])
    assert "rank 0 of 2 could not add up gradients in step" in said
    assert "another rank has stopped or hangs: look at its log first" in said
    assert "/gloo/" not in said and "before reporting an error" not in said
    assert seconds < SHORT.total_seconds() + 2
    if how in ("int3", "sparse", "inline"):
        assert afterwards.startswith("SyncError: rank 0 of 2 could not")  # a state of half a step would be none


def stuck(rank: int, mode: Any) -> Any:
    run = Training(mode=mode, timeout=SHORT)
    run.steps(rank, [0, 1])  # DDP rebuilds its buckets before the second, in its own group and time
    if rank == 1:
        time.sleep(SHORT.total_seconds() + 2)
        return None
    start = time.monotonic()
    return refusal(lambda: run.steps(rank, [2])), time.monotonic() - start


@pytest.mark.parametrize("mode", ["int3", "dense"])
def test_a_rank_that_hangs_is_an_error_after_the_timeout(mode: str, tmp_path: Path) -> None:
    (said, seconds), _ = run_ranks(stuck, 2, tmp_path, mode)
    assert said.startswith("SyncError: rank 0 of 2 could not") and "a longer timeout than 0:00:03" in said
    assert 2 < seconds < SHORT.total_seconds() + 2


def test_an_error_is_printed_once_and_what_follows_from_a_lost_rank_is_no_news(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = SyncError("rank 1 of 2 could not add up gradients in step 7")
    say_error(lost, 1)
    assert capsys.readouterr().err == f"error: {lost}\n" and was_said(lost)
    own = ValueError("my own bug")
    say_error(own, 1)
    assert capsys.readouterr().err == "rank 1: ValueError: my own bug\n" and not was_said(own)
    another = RuntimeError("[/x/gloo/pair.cc:553] Connection closed by peer. This is typically")

    def end_with(error: Exception) -> None:
        with errors_as_warnings():
            raise error

    try:
        raise lost
    except SyncError:
        end_with(another)
        with pytest.warns(UserWarning, match="after the training was stopped: ValueError: my own bug"):
            end_with(own)


def test_the_reason_of_an_error_is_its_first_line_and_the_next_after_a_colon() -> None:
    assert reason_of(ValueError("no file\nmore")) == "no file" and reason_of(ValueError()) == "no message"
    assert reason_of(ConfigError("of another run:\n  rank: 2, 3 now\n  seed: 1")) == "of another run: rank: 2, 3 now"
    gloo = "[/x/gloo/pair.cc:534] Connection closed by peer. This is typically a network error"
    assert reason_of(RuntimeError(gloo)) == "Connection closed by peer"
