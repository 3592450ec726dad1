"""Real faults of disks and folders: the reason is said, training may go on, and the last good snapshot stays."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.runs.snapshot_states import same, small_state
from lightning_aigc.checkpoint import SnapshotWriter, newest_complete
from lightning_aigc.checkpoint.files import staging
from lightning_aigc.checkpoint.files import writer as writer_module
from lightning_aigc.errors import SnapshotError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SnapshotWriter]:
    """With one good snapshot, of step 1."""
    store = SnapshotWriter(tmp_path / "run")
    store.open()
    store.save(1, small_state(1))
    store.wait()
    yield store
    store.error()
    store.close()


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Something mounted on the folder; skips where that is not allowed."""
    mount = ["mount", *options, str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def assert_whole(store: SnapshotWriter, step: int) -> None:
    newest = newest_complete(store.directory, lambda line: pytest.fail(line))
    assert newest is not None and newest.step == step and same(newest.rank(0), small_state(step))
    assert sorted(path.name for path in store.directory.iterdir() if path.name.startswith(".")) == [".lock"]


def test_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=1m", "none"):
        store = SnapshotWriter(folder)
        store.open()
        store.save(1, small_state(1))
        store.wait()
        store.save(2, {"large": torch.ones(2**19)})
        with pytest.raises(
            SnapshotError, match=r"step 2 could not be written to .*: No space left on device.*step 1 is"
        ):
            store.wait()
        assert_whole(store, 1)
        store.save(3, small_state(3))  # there is room again
        store.close()
        assert_whole(store, 3)


def test_a_limit_on_file_sizes(store: SnapshotWriter) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        store.save(2, {"large": torch.ones(10**6)})
        with pytest.raises(SnapshotError, match="File too large"):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_whole(store, 1)


def test_a_folder_that_turns_read_only_while_training(store: SnapshotWriter) -> None:
    with mounted(store.directory, "--bind", "-o", "ro", str(store.directory)):
        store.save(2, small_state(2))
        with pytest.raises(SnapshotError, match="Read-only file system"):
            store.wait()
    store.save(3, small_state(3))
    store.wait()
    assert_whole(store, 3)


def test_a_read_only_folder_is_refused_before_training(tmp_path: Path) -> None:
    with (
        mounted(tmp_path, "--bind", "-o", "ro", str(tmp_path)),
        pytest.raises(SnapshotError, match=r"no snapshots can be written to .*: Read-only file system"),
    ):
        SnapshotWriter(tmp_path / "run").open()


def test_a_file_system_without_locks_is_used_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    store = SnapshotWriter(tmp_path)
    with pytest.warns(UserWarning, match="is on a file system without locks"):
        store.open()
    store.save(1, small_state(1))
    store.close()
    assert_whole(store, 1)


def test_facts_for_a_snapshot_that_was_not_written_say_so(store: SnapshotWriter) -> None:
    with pytest.raises(SnapshotError, match="the snapshot of step 7 was not written, so nothing says that this run"):
        store.amend(7, {"is_finished": True})


def test_no_host_memory_is_said_and_the_next_save_goes_on(
    store: SnapshotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(size: int, *, pinned: bool) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "host_bytes", none_left)
        with pytest.raises(SnapshotError, match="no host memory for the 4 MiB of a snapshot: DefaultCPUAllocator"):
            store.save(2, {"large": torch.ones(10**6)})
    store.save(3, small_state(3))
    store.wait()
    assert_whole(store, 3)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(SnapshotError, match=r"no snapshots can be written to .*: File exists"):
        SnapshotWriter(tmp_path / "run").open()


def test_a_folder_that_was_deleted_while_training(store: SnapshotWriter) -> None:
    shutil.rmtree(store.directory)
    store.save(2, small_state(2))
    with pytest.raises(SnapshotError, match="No such file or directory"):
        store.wait()


def test_a_failure_is_told_once_without_waiting_and_the_next_save_goes_on(
    store: SnapshotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        store.save(2, small_state(2))
        store.join()
    error = store.error()
    assert isinstance(error, SnapshotError) and "Input/output error; step 1 is whole" in str(error)
    assert store.error() is None
    store.wait()
    assert_whole(store, 1)
    store.save(3, small_state(3))
    store.wait()
    assert_whole(store, 3)


def test_a_full_disk_in_a_resumed_run_names_the_snapshot_of_the_run_before(
    store: SnapshotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    store.close()
    resumed = SnapshotWriter(store.directory)
    resumed.open()
    monkeypatch.setattr(os, "fsync", full)
    resumed.save(2, small_state(2))
    with pytest.raises(SnapshotError, match="No space left on device; step 1 is whole"):
        resumed.close()


def test_a_failed_late_copy_lets_training_go_on(store: SnapshotWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(copies: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(writer_module.StagingCopies, "finish", broken)
    store.save(2, small_state(2))
    store.finish_copy()
    with pytest.raises(SnapshotError, match="RuntimeError: the device is gone; step 1 is whole"):
        store.wait()
    assert_whole(store, 1)


def test_an_old_snapshot_that_cannot_be_removed_does_not_spoil_the_new_one(
    store: SnapshotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*arguments: Any) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(writer_module, "rotate", busy)
    store.save(2, small_state(2))
    with pytest.raises(
        SnapshotError, match="step 2 is whole, but an older one could not be removed: Device or resource"
    ):
        store.wait()
    assert_whole(store, 2)
