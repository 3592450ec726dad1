"""Killed at any moment, a run loses nothing that it was told is durable, and leaves its folder free."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from fakes.runs.snapshot_writer import checkpoint_forever, hold, start, state_of, write_forever
from lightning_aigc.checkpoint import SnapshotCheckpointIO, SnapshotWriter, newest_complete
from lightning_aigc.errors import SnapshotError

KILLS = 40


def test_no_kill_loses_a_snapshot_that_was_durable(tmp_path: Path) -> None:
    told = tmp_path / "told"
    folder = tmp_path / "snapshots"
    draw = random.Random(7)
    kills_with_work = unfinished = 0
    for version in range(KILLS):
        told.write_text("")
        process = start(write_forever, str(folder), str(told), version)
        deadline = time.monotonic() + 60
        while not told.read_text() and version % 4 and time.monotonic() < deadline:
            time.sleep(0.002)  # each fourth one is killed wherever it is, its start included
        time.sleep(draw.uniform(0, 0.06))
        process.kill()
        process.join()
        lines = told.read_text().split("\n")[:-1]
        unfinished += any(path.name.startswith(".step") for path in folder.glob(".*")) if folder.exists() else 0
        passed_over: list[str] = []
        newest = newest_complete(folder, passed_over.append)
        assert passed_over == []  # whatever has a snapshot's name is one
        if lines:
            kills_with_work += 1
            assert newest is not None
            state = newest.rank(0)
            assert (newest.step, state["version"]) >= tuple(map(int, lines[-1].split()))
            assert torch.equal(state["weights"], state_of(newest.step, state["version"])["weights"])
            assert newest.shared() == {"shared": newest.step}
    assert kills_with_work >= KILLS // 2 and unfinished >= 3  # or the kills came too early or too late to prove much


def test_no_kill_tears_an_ordinary_checkpoint_or_leaves_more_than_its_last_half(tmp_path: Path) -> None:
    path, told = tmp_path / "run" / "last.ckpt", tmp_path / "told"
    draw = random.Random(3)
    for version in range(12):
        told.write_text("")
        process = start(checkpoint_forever, str(path), str(told), version)
        while not told.read_text():
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.03))
        process.kill()
        process.join()
        state = SnapshotCheckpointIO().load_checkpoint(path)
        assert state["step"] >= int(told.read_text().split("\n")[:-1][-1])
        assert torch.equal(state["weights"], state_of(state["step"], state["version"])["weights"])
        assert {file.name for file in path.parent.iterdir()} <= {"last.ckpt", ".last.ckpt.snapshot.tmp"}


@pytest.mark.parametrize("with_child", [False, True], ids=["alone", "with a data worker"])
def test_a_second_run_is_refused_until_the_first_is_gone(with_child: bool, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    owner = start(partial(hold, with_child=with_child), str(tmp_path / "run"), str(ready))
    while not ready.exists():
        time.sleep(0.01)
    store = SnapshotWriter(tmp_path / "run")
    with pytest.raises(SnapshotError, match=rf"is in use by process {owner.pid} on \S+: two runs cannot write"):
        store.open()
    owner.kill()
    owner.join()
    store.open()
    store.save(1, {})
    store.close()


def test_two_runs_of_one_process_are_refused_too(tmp_path: Path) -> None:
    first, second = SnapshotWriter(tmp_path), SnapshotWriter(tmp_path)
    first.open()
    with pytest.raises(SnapshotError, match="two ExactSnapshots of this process write into"):
        second.open()
    first.close()
    second.open()
    second.close()
