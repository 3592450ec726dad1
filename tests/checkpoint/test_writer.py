"""Snapshots are whole, hold the moment of `save`, and go by step number alone."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fakes.runs.snapshot_states import same, small_state
from lightning_aigc.checkpoint import SnapshotWriter, find_snapshots, newest_complete
from lightning_aigc.checkpoint.files import writer as writer_module
from lightning_aigc.checkpoint.files.staging import NICE
from lightning_aigc.errors import SnapshotError


def opened(directory: Path, **arguments: Any) -> SnapshotWriter:
    store = SnapshotWriter(directory, **arguments)
    store.open()
    return store


def steps(directory: Path) -> list[int]:
    return [snapshot.step for snapshot in find_snapshots(directory)]


def silent(line: str) -> None:
    raise AssertionError(line)


def test_a_snapshot_holds_what_was_saved(tmp_path: Path) -> None:
    store = opened(tmp_path / "deep" / "snapshots")
    facts = {"metric": 0.78, "config": {"lr": [1e-4, None], "名": "x"}}
    store.save(500, small_state(1), small_state(2), facts)
    store.close()
    found = newest_complete(store.directory, silent)
    assert found is not None and found.path == store.directory / "step-00000500"
    assert (found.step, found.world_size, found.facts) == (500, 1, facts)
    assert same(found.rank(0), small_state(1)) and same(found.shared(), small_state(2))
    files = {path.name for path in found.path.iterdir()}
    assert files == {
        *("manifest.json", "rank0.json", "rank0.safetensors", "shared.json", "shared.safetensors"),
    }
    assert store.written_bytes == sum(path.stat().st_size for path in found.path.iterdir())
    weights = small_state(2)["weights"]
    read = safetensors.torch.load_file(found.path / "shared.safetensors")
    assert torch.equal(read["weights.conv"], weights["conv"])


def test_what_changes_after_save_is_not_in_it(tmp_path: Path) -> None:
    store = opened(tmp_path)
    state = small_state()
    store.save(1, state, state)
    state["weights"]["conv"].zero_()
    state["loops"]["epoch"] = 99
    store.close()
    (snapshot,) = find_snapshots(tmp_path)
    assert same(snapshot.rank(0), small_state()) and same(snapshot.shared(), small_state())


def test_late_tensors_are_copied_beside_training_until_finish_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    go = threading.Event()
    finish = writer_module.StagingCopies.finish
    monkeypatch.setattr(writer_module.StagingCopies, "finish", lambda copies: (go.wait(20), finish(copies))[1])
    early, late = torch.zeros(1000), torch.zeros(1000)
    store.save(1, {"early": early, "late": late}, deferred={late.data_ptr()})
    early += 1
    late += 2  # before the copy, so that the file shows who copied it when
    threading.Timer(0.05, go.set).start()
    store.finish_copy()
    assert store.blocked_s > 0.04
    late += 4
    store.close()
    back = find_snapshots(tmp_path)[0].rank(0)
    assert not back["early"].any() and (back["late"] == 2).all()


def test_the_next_save_waits_for_the_one_before_and_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    slow = threading.Event()
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (slow.wait(20), sync(file))[1])  # a slow disk
    store.save(1, small_state(1))
    assert store.blocked_s < 1 and steps(tmp_path) == []
    join = store.join

    def waiting() -> None:
        threading.Timer(0.3, slow.set).start()  # from here, so that a busy machine does not shorten the wait
        join()

    monkeypatch.setattr(store, "join", waiting)
    store.save(2, small_state(2))
    assert store.blocked_s > 0.2 and steps(tmp_path) == [1]
    store.close()
    assert [same(s.rank(0), small_state(s.step)) for s in find_snapshots(tmp_path)] == [True, True]


def test_rotation_keeps_the_last_steps_and_those_protected(tmp_path: Path) -> None:
    store = opened(tmp_path, keep_last=2)
    store.protected |= {10}
    for step in (10, 20, 30, 40, 50):
        store.save(step, {"step": step})
    store.close()
    assert steps(tmp_path) == [50, 40, 10]
    assert all(snapshot.rank(0) == {"step": snapshot.step} for snapshot in find_snapshots(tmp_path))


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path, keep_last=2)
    for age, step in enumerate((1, 2, 3, 4)):
        store.save(step, {"step": step})
        store.wait()
        for path in (tmp_path / f"step-{step:08d}").iterdir():
            os.utime(path, (10**9 - age, 10**9 - age))
        os.utime(tmp_path / f"step-{step:08d}", (10**9 - age, 10**9 - age))
    store.close()
    assert steps(tmp_path) == [4, 3]
    newest = newest_complete(tmp_path, silent)
    assert newest is not None and newest.step == 4


def test_the_previous_snapshot_goes_only_when_the_new_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, keep_last=1)
    store.save(1, small_state(1))
    store.wait()
    seen = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (seen.append(steps(tmp_path)), sync(file))[1])
    store.save(2, small_state(2))
    store.close()
    assert seen[:-1] == [[1]] * (len(seen) - 1) and seen[-1] == [2, 1] and steps(tmp_path) == [2]


def test_every_file_and_name_is_synced_before_what_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    done: list[str] = []
    sync = os.fsync
    moves = {name: getattr(Path, name) for name in ("rename", "replace")}

    def short(path: Path) -> str:
        assert store._lock is not None
        return path.name.replace(store._lock.run, "run")

    def synced(file: int) -> None:
        done.append(f"sync {short(Path(f'/proc/self/fd/{file}').readlink())}")
        sync(file)

    def moved(move: Callable[[Path, Path], Path], path: Path, target: Path) -> Path:
        done.append(f"name {short(target)}")
        return move(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    for name, move in moves.items():
        monkeypatch.setattr(Path, name, lambda path, target, move=move: moved(move, path, target))
    store.save(9, {})
    store.wait()
    files = ["shared.safetensors", "shared.json", "rank0.safetensors", "rank0.json"]
    assert done == [
        *(line for name in files for line in (f"sync {name}.tmp", f"name {name}")),
        "sync .step-00000009.run.0",
        *("sync manifest.json.tmp", "name manifest.json", "sync .step-00000009.run.0"),
        *("name step-00000009", f"sync {tmp_path.name}"),
    ]
    store.close()


def test_going_back_keeps_what_the_run_left_ahead_and_what_it_writes(tmp_path: Path) -> None:
    store = opened(tmp_path, keep_last=2)
    for step in (300, 400, 500):
        store.save(step, {"run": 1})
    store.close()
    store = opened(tmp_path, keep_last=2)
    for step in (320, 340, 360):
        store.save(step, {"run": 2})
    store.close()
    assert steps(tmp_path) == [500, 400, 360, 340]


def test_a_step_that_comes_again_replaces_its_snapshot_and_the_old_one_stays_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.save(7, small_state(1))
    store.wait()
    seen: list[int] = []
    moves = {name: getattr(Path, name) for name in ("rename", "replace")}

    def watched(move: Callable[[Path, Path], Path], path: Path, target: Path) -> Path:
        newest = newest_complete(tmp_path, lambda line: None)
        seen.append(newest.rank(0)["seed"] if newest else -1)
        return move(path, target)

    for name, move in moves.items():
        monkeypatch.setattr(Path, name, lambda path, target, move=move: watched(move, path, target))
    store.save(7, small_state(2))
    store.close()
    # five files and the folder; then the new one is there beside the old, which goes
    assert seen == [1] * 6 + [2, 2]
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "step-00000007"}


@pytest.mark.parametrize("old_is_gone", [False, True])
def test_a_kill_while_a_step_is_replaced_leaves_the_new_one_and_the_next_run_tidies(
    old_is_gone: bool, tmp_path: Path
) -> None:
    opened_once = opened(tmp_path)
    opened_once.save(7, small_state(1))
    opened_once.save(8, small_state(2))
    opened_once.close()
    manifest = tmp_path / "step-00000007"
    (tmp_path / "step-00000008").rename(tmp_path / "step-00000007.again")  # as the kill would leave it
    if old_is_gone:
        manifest.rename(tmp_path / ".gone.step-00000007")
    newest = newest_complete(tmp_path, silent)
    assert newest is not None and newest.rank(0)["seed"] == 2
    opened(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "step-00000007"}
    newest = newest_complete(tmp_path, silent)
    assert newest is not None and newest.rank(0)["seed"] == 2


def test_what_a_killed_run_left_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    ours = [
        ".step-00000500.0123abcd.0",
        ".step-00000500.0123abcd.12",
        ".gone.step-00000400",
        ".gone.step-00000400.again",
    ]
    for name in ours:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.safetensors.tmp").write_bytes(b"half")
    foreign = ["notes.tmp", ".gitignore", "step-5.zip", ".step-backup", "step-latest", "lora.safetensors"]
    for name in foreign:
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-00000001").mkdir()  # the user's, or torn: nothing says that it is ours
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    store = opened(tmp_path, keep_last=1)
    for step in (2, 3):
        store.save(step, {})
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {*foreign, "step-00000001", "step-00000003", ".lock"}


def test_links_are_followed_to_read_and_never_to_remove(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    store = opened(elsewhere)
    store.save(1, small_state(1))
    store.close()
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run", target_is_directory=True)
    (tmp_path / "run" / "step-00000001").symlink_to(elsewhere / "step-00000001", target_is_directory=True)
    (tmp_path / "run" / ".step-00000009.0123abcd.0").symlink_to(elsewhere, target_is_directory=True)
    store = opened(tmp_path / "link", keep_last=1)
    store.save(2, small_state(2))
    store.close()
    assert steps(tmp_path / "run") == steps(tmp_path / "link") == [2, 1]
    assert same(find_snapshots(elsewhere)[0].rank(0), small_state(1))


def test_a_linked_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(victim)
    with pytest.raises(SnapshotError, match=r"no snapshots can be written to .*Too many levels of symbolic links"):
        opened(tmp_path / "run")
    assert victim.read_text() == "precious"


def test_states_and_facts_that_cannot_be_held_are_refused_and_the_next_save_works(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(SnapshotError, match=r"callbacks\.best is a builtins\.complex"):
        store.save(1, {"callbacks": {"best": 1j}})
    with pytest.raises(SnapshotError, match="facts must be plain JSON"):
        store.save(1, {}, facts={"path": tmp_path})
    store.save(1, small_state())
    store.close()
    assert steps(tmp_path) == [1]


def test_host_memory_is_taken_once_and_no_second_copy_is_made(tmp_path: Path) -> None:
    store = opened(tmp_path)
    state = {"weights": torch.ones(3_000_000)}
    places = set()
    for step in range(3):
        store.save(step, state)
        store.wait()
        places |= {slab.data_ptr() for slab in store._buffers["rank0"]._slabs}
    store.close()
    assert len(places) == 1 and store.copied_bytes == 12_000_000


def test_no_tensor_is_held_while_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    go = threading.Event()
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (go.wait(20), sync(file))[1])
    gradient = torch.ones(1000)
    place = gradient.data_ptr()
    store.save(1, {"gradient": gradient}, deferred={place})
    store.finish_copy()
    del gradient
    tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor and torch._C._has_storage(value)]
    held = [tensor for tensor in tensors if tensor.data_ptr() == place]
    go.set()
    store.close()
    assert held == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a thread a priority of its own")
def test_the_thread_that_writes_gives_way_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, seen = priority(), []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (seen.append(priority()), sync(file))[1])
    store = opened(tmp_path)
    store.save(1, {})
    store.close()
    assert set(seen) == {NICE} and priority() == before


def test_using_it_wrongly_is_said(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="keep_last must be at least 1, got 0"):
        SnapshotWriter(tmp_path, keep_last=0)
    with pytest.raises(SnapshotError, match=r"open\(\) comes before save\(\)"):
        SnapshotWriter(tmp_path).save(1, {})
    with pytest.raises(SnapshotError, match="s3://bucket/run is a remote address"):
        SnapshotWriter("s3://bucket/run")
