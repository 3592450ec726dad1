"""Several ranks make one snapshot or none, through files alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fakes.processes.ranks import run_ranks
from fakes.runs.snapshot_states import same, small_state
from lightning_aigc.checkpoint import SnapshotWriter, find_snapshots, newest_complete
from lightning_aigc.checkpoint.files import commit
from lightning_aigc.errors import SnapshotError


def ranks_of(directory: Path, count: int, timeout_s: float = 20) -> list[SnapshotWriter]:
    stores = [SnapshotWriter(directory, rank=k, world_size=count, commit_timeout_s=timeout_s) for k in range(count)]
    for store in reversed(stores):  # rank 0 is the last
        store.open()
    return stores


def save(stores: list[SnapshotWriter], step: int, seed: int = 0) -> None:
    for store in stores:
        store.save(step, small_state(10 * seed + store.rank), "shared" if store.rank == 0 else None)


def reason(store: SnapshotWriter) -> str:
    with pytest.raises(SnapshotError) as caught:
        store.wait()
    return str(caught.value)


def several_steps(rank: int, ranks: int, folder: str) -> list[int]:
    store = SnapshotWriter(folder, rank=rank, world_size=ranks, keep_last=2)
    store.open()
    seen = []
    for step in range(4):
        store.save(step, small_state(10 * step + rank), {"step": step})
        store.wait()
        seen.append(find_snapshots(folder)[0].step)
    store.close()
    return seen


def test_ranks_of_their_own_processes_agree_on_every_step(tmp_path: Path) -> None:
    seen = run_ranks(several_steps, 3, tmp_path / "ranks", 3, str(tmp_path / "run"), gloo=False)
    for of_rank in seen:
        assert all(newest >= step for step, newest in enumerate(of_rank))  # durable for one is durable for all
    newest = newest_complete(tmp_path / "run", lambda line: pytest.fail(line))
    assert newest is not None and (newest.step, newest.world_size) == (3, 3) and newest.shared() == {"step": 3}
    assert all(same(newest.rank(k), small_state(30 + k)) for k in range(3))
    with pytest.raises(SnapshotError, match=r"was written by 3 rank\(s\); there is no rank 3 in it"):
        newest.rank(3)


def test_a_rank_that_does_not_come_is_named_and_the_older_snapshot_stays(tmp_path: Path) -> None:
    stores = ranks_of(tmp_path, 3, timeout_s=0.5)
    save(stores, 1)
    for store in stores:
        store.wait()
    save(stores[:2], 2)
    said = reason(stores[0])
    assert "rank 2 has not written its files after 0.5 s; all ranks need" in said and "a file system they share" in said
    assert "rank 0" in reason(stores[1])
    assert [s.step for s in find_snapshots(tmp_path)] == [1]
    for store in stores:
        store.close()


def test_a_rank_whose_run_nobody_opened_says_so(tmp_path: Path) -> None:
    store = SnapshotWriter(tmp_path, rank=1, world_size=2, commit_timeout_s=0.1)
    store.open()
    store.save(1, {})
    assert "rank 0 has not opened the folder after 0.1 s" in reason(store)


def test_what_fails_on_one_rank_is_known_to_all_at_once(tmp_path: Path) -> None:
    stores = ranks_of(tmp_path, 3)
    with pytest.raises(SnapshotError, match=r"bad is a builtins\.set"):
        stores[1].save(1, {"bad": {1}})
    save([stores[0], stores[2]], 1)
    for store in (stores[0], stores[2]):
        assert "rank 1 failed: bad is a builtins.set" in reason(store)
    with pytest.raises(SnapshotError, match=r"bad is a builtins\.set"):
        stores[0].save(2, {}, {"bad": {1}})
    save(stores[1:], 2)
    for store in stores[1:]:
        assert "rank 0 failed: bad is a builtins.set" in reason(store)
    save(stores, 3)
    for store in stores:
        store.close()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "step-00000003"}


def test_a_file_that_another_rank_renames_while_rank_0_gives_up_hides_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = ranks_of(tmp_path, 2)
    attempt = commit.Attempt(tmp_path, 1, 0, 0, 2, 1.0, run=None)
    attempt._folder().mkdir()
    listed = [attempt._folder() / "rank1.safetensors.tmp"]  # gone by the time that it is removed
    monkeypatch.setattr(Path, "glob", lambda *_: iter(listed))
    attempt.abandon("the disk is full")
    assert (attempt._folder() / "rank0.failed").read_text() == "the disk is full"
    for store in stores:
        store.close()


def test_rank_0_may_publish_before_another_rank_has_synced_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, published = ranks_of(tmp_path, 2), threading.Event()
    publish, write, sync_folder = commit.publish, commit.Attempt.write, commit.sync_folder
    late = threading.local()

    def publish_and_tell(folder: Path, step: int) -> Path:
        final = publish(folder, step)
        published.set()
        return final

    def write_as(attempt: commit.Attempt) -> int:
        late.rank = attempt.rank
        return write(attempt)

    def sync_late(folder: Path) -> None:
        assert late.rank == 0 or published.wait(20)
        sync_folder(folder)

    monkeypatch.setattr(commit, "publish", publish_and_tell)
    monkeypatch.setattr(commit.Attempt, "write", write_as)
    monkeypatch.setattr(commit, "sync_folder", sync_late)
    save(stores, 1)
    for store in stores:
        store.close()
    assert [snapshot.step for snapshot in find_snapshots(tmp_path)] == [1]


def test_files_of_a_killed_run_never_get_into_a_later_one(tmp_path: Path) -> None:
    stores = ranks_of(tmp_path, 2, timeout_s=0.3)
    save(stores[1:], 1, seed=1)  # this rank wrote its part, and rank 0 was killed
    assert "rank 0 has not written the manifest after 0.3 s" in reason(stores[1])
    stores[0].close()
    again = ranks_of(tmp_path, 2)
    save(again, 1, seed=2)
    for store in again:
        store.close()
    assert [same(find_snapshots(tmp_path)[0].rank(k), small_state(20 + k)) for k in range(2)] == [True, True]


def test_files_of_a_slow_rank_never_get_into_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = ranks_of(tmp_path, 2)
    slow = threading.Event()
    write = commit.write_file

    def write_file(path: Path, chunks: Any) -> Any:
        if path.name == "rank1.json":
            slow.wait(20)
        return write(path, chunks)

    monkeypatch.setattr(commit, "write_file", write_file)
    stores[0].commit_timeout_s = 0.2
    save(stores, 1, seed=1)
    assert "rank 1 has not written its files" in reason(stores[0])
    stores[0].commit_timeout_s = 20
    save(stores[:1], 1, seed=2)
    slow.set()
    assert "rank 0 failed: rank 1 has not written its files" in reason(stores[1])
    save(stores[1:], 1, seed=2)
    for store in stores:
        store.close()
    assert [same(find_snapshots(tmp_path)[0].rank(k), small_state(20 + k)) for k in range(2)] == [True, True]


def test_a_rank_file_that_shrinks_before_the_commit_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = ranks_of(tmp_path, 2)
    files_of = commit.Attempt._files_of

    def torn(attempt: Any, folder: Path, rank: int) -> Any:
        if (folder / "rank1.json").exists():
            (folder / "rank1.safetensors").write_bytes(b"")
        return files_of(attempt, folder, rank)

    monkeypatch.setattr(commit.Attempt, "_files_of", torn)
    save(stores, 1)
    assert "rank1.safetensors has 0 bytes, rank 1 wrote" in reason(stores[0])
    reason(stores[1])
    assert find_snapshots(tmp_path) == []
    for store in stores:
        store.close()
