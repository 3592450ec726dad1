"""Stock ModelCheckpoint with SnapshotCheckpointIO: the same files, written beside training, whole or not at all."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import subprocess
import threading
import time
import warnings
from argparse import Namespace
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from fakes.models.small_lightning import Small, fit
from fakes.processes.ranks import run_ranks
from fakes.runs.snapshot_states import same
from lightning_aigc.checkpoint import SnapshotCheckpointIO, async_checkpoint_io
from lightning_aigc.checkpoint.files import torch_file
from lightning_aigc.errors import SnapshotError
from lightning_aigc.strategies import NPUSparseStrategy


@pytest.fixture
def io() -> Any:
    plugin = SnapshotCheckpointIO()
    yield plugin
    plugin._error = None
    plugin.teardown()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing becomes durable until it is set."""
    event = threading.Event()
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (event.wait(20), sync(file))[1])
    yield event
    event.set()


def run(
    folder: Path, *plugins: Any, model: Any = None, epochs: int = 3, ckpt_path: Any = None, **checkpoint: Any
) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep = ModelCheckpoint(folder, filename="{epoch}-{step}", **checkpoint)
        given = {"enable_checkpointing": True, "callbacks": [keep], "plugins": list(plugins), "max_epochs": epochs}
        return fit(0, model or Small(), batches=4, ckpt_path=ckpt_path, **given)


def save_as_a_fit_that_ends(io: SnapshotCheckpointIO, path: Path) -> None:
    """Save, and tear down as Lightning does while it handles an error."""
    try:
        io.save_checkpoint({"a": torch.ones(3)}, path)
    finally:
        io.teardown()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "arguments",
    [
        {"save_top_k": -1},
        {"save_top_k": 1},
        {"save_top_k": 2, "monitor": "loss", "save_last": "link"},
        {"save_top_k": 1, "every_n_train_steps": 2, "save_last": True},
    ],
    ids=str,
)
def test_files_are_those_of_lightnings_own_plugin(arguments: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path / "stock", **arguments)
    run(tmp_path / "ours", SnapshotCheckpointIO(), **arguments)
    assert names(tmp_path / "ours") == names(tmp_path / "stock") != set()
    for path in (tmp_path / "stock").iterdir():
        ours = tmp_path / "ours" / path.name
        assert ours.is_symlink() == path.is_symlink()
        stock = torch.load(path, weights_only=True)
        there = torch.load(ours, weights_only=True)
        stock.pop("callbacks"), there.pop("callbacks")  # they hold the folder
        assert same(there, stock)
        assert abs(ours.stat().st_size - path.stat().st_size) < 2000


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole", SnapshotCheckpointIO())
    run(tmp_path / "parts", SnapshotCheckpointIO(), epochs=1, save_last="link")
    resumed, _ = run(tmp_path / "again", SnapshotCheckpointIO(), ckpt_path=tmp_path / "parts" / "last.ckpt")
    assert len(resumed.after) == 8 and torch.equal(resumed.flat(), whole.flat())


def test_save_returns_before_the_file_is_there_and_keeps_the_moment(
    io: SnapshotCheckpointIO, gate: threading.Event, tmp_path: Path
) -> None:
    state = {"weights": torch.zeros(5), "history": [1], "nested": {"inner": (torch.zeros(2),)}}
    io.save_checkpoint(state, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    state["weights"] += 1
    state["history"].append(2)
    state["nested"]["inner"][0].add_(1)
    gate.set()
    loaded = io.load_checkpoint(tmp_path / "a.ckpt")  # waits for what is being written
    assert same(loaded, {"weights": torch.zeros(5), "history": [1], "nested": {"inner": (torch.zeros(2),)}})


def test_an_old_checkpoint_is_there_until_the_new_one_is_durable(
    io: SnapshotCheckpointIO, gate: threading.Event, tmp_path: Path
) -> None:
    (tmp_path / "old.ckpt").write_bytes(b"old")
    io.save_checkpoint({"a": 1}, tmp_path / "new.ckpt")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    time.sleep(0.05)
    assert (tmp_path / "old.ckpt").exists() and not (tmp_path / "new.ckpt").exists()
    gate.set()
    io.wait()
    assert names(tmp_path) == {"new.ckpt"}


def test_a_failed_write_keeps_the_old_one_and_is_raised_by_the_next_save(
    io: SnapshotCheckpointIO, tmp_path: Path
) -> None:
    io.save_checkpoint({"a": 1}, tmp_path / "old.ckpt")
    (tmp_path / "new.ckpt").mkdir()
    io.save_checkpoint({"a": 2}, tmp_path / "new.ckpt")
    io.remove_checkpoint(tmp_path / "old.ckpt")
    io._finish()
    with pytest.raises(SnapshotError, match=r"the checkpoint .*new\.ckpt could not be written: Is a directory"):
        io.save_checkpoint({"a": 3}, tmp_path / "third.ckpt")
    io.wait()
    assert io.load_checkpoint(tmp_path / "old.ckpt") == {"a": 1}


def test_a_full_disk_is_named_and_leaves_nothing_half(io: SnapshotCheckpointIO, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        io.save_checkpoint({"a": torch.ones(1000)}, folder / "same.ckpt")
        io.save_checkpoint({"a": torch.ones(10**6)}, folder / "same.ckpt")
        with pytest.raises(SnapshotError, match=r"same\.ckpt could not be written: No space left on device"):
            io.teardown()
        assert names(folder) == {"same.ckpt"} and io.load_checkpoint(folder / "same.ckpt")["a"].shape == (1000,)
    finally:
        io.teardown()
        subprocess.run(["umount", str(folder)], check=True)


def test_what_cannot_be_pickled_is_said_by_teardown_once(io: SnapshotCheckpointIO, tmp_path: Path) -> None:
    io.save_checkpoint({"f": threading.Event}, tmp_path / "fine.ckpt")
    io.save_checkpoint({"f": lambda: 1}, tmp_path / "bad.ckpt")
    with pytest.raises(SnapshotError, match=r"bad\.ckpt could not be written: .*lambda"):
        io.teardown()
    io.teardown()
    assert names(tmp_path) == {"fine.ckpt"}


def test_a_trainer_stops_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    with pytest.raises(SnapshotError, match=r"cannot be written: Not a directory"):
        run(tmp_path / "file" / "run", SnapshotCheckpointIO(), epochs=1)
    broken = SnapshotCheckpointIO()
    monkeypatch.setattr(async_checkpoint_io, "write_torch_file", lambda state, path: (tmp_path / "gone").stat())
    with pytest.raises(SnapshotError, match=r"epoch=0-step=4\.ckpt could not be written: No such file"):
        run(tmp_path / "run", broken, epochs=3)


@pytest.fixture
def may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, threading.Event]:
    """Every write fails; those of first.ckpt and second.ckpt once their events are set."""
    events = {name: threading.Event() for name in ("first.ckpt", "second.ckpt")}

    def fail(state: Any, path: Path) -> None:
        if path.name in events:
            events[path.name].wait(20)
        (tmp_path / "gone").stat()

    monkeypatch.setattr(async_checkpoint_io, "write_torch_file", fail)
    monkeypatch.setattr(async_checkpoint_io, "ROOM", 3)  # the second save does not wait for the first
    return events


def test_the_first_of_several_errors_is_raised(tmp_path: Path, may_fail: dict[str, threading.Event]) -> None:
    io = SnapshotCheckpointIO()
    for name in may_fail:
        io.save_checkpoint({"a": torch.ones(3)}, tmp_path / name)
    for event in may_fail.values():  # both fail before the error is raised
        event.set()
    with pytest.raises(SnapshotError, match=r"first\.ckpt could not be written: No such file"):
        io.wait()
    io.teardown()  # said once


def test_teardown_does_not_hide_the_error_that_ended_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_fail: dict[str, threading.Event]
) -> None:
    io = SnapshotCheckpointIO()
    for name in may_fail:
        io.save_checkpoint({"a": torch.ones(3)}, tmp_path / name)
    may_fail["first.ckpt"].set()
    io._writing[0][0].result()
    finish = io._finish  # teardown calls it: the second write fails after the first error was raised
    monkeypatch.setattr(io, "_finish", lambda: (may_fail["second.ckpt"].set(), finish()))
    first, second = r"first\.ckpt could not be written", r"second\.ckpt could not be written: No such file"
    with pytest.warns(UserWarning, match=second), pytest.raises(SnapshotError, match=first):
        save_as_a_fit_that_ends(io, tmp_path / "third.ckpt")
    io.save_checkpoint({"a": torch.ones(3)}, tmp_path / "fourth.ckpt")
    with pytest.raises(SnapshotError, match=r"fourth\.ckpt could not be written"):
        io.teardown()


def test_a_failed_checkpoint_does_not_hide_the_error_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.current_epoch == batch_idx == 1:
                raise ValueError("the training's own error")

    monkeypatch.setattr(async_checkpoint_io, "write_torch_file", lambda state, path: (tmp_path / "gone").stat())
    with pytest.raises(ValueError, match="the training's own error") as broken:
        run(tmp_path / "run", SnapshotCheckpointIO(), model=Breaks())
    assert broken.value.__context__ is None
    with pytest.raises(ValueError, match="the training's own error"):
        run(tmp_path / "saved again", SnapshotCheckpointIO(), model=Breaks(), save_on_exception=True)
    try:
        raise broken.value
    except ValueError:  # a retry, in which nothing breaks but the checkpoint
        with pytest.raises(SnapshotError, match=r"epoch=0-step=4\.ckpt could not be written"):
            run(tmp_path / "retry", SnapshotCheckpointIO(), epochs=1)


def test_shared_storages_are_copied_once_and_stay_shared(io: SnapshotCheckpointIO, tmp_path: Path) -> None:
    whole = torch.arange(50_000.0)
    layer = nn.Linear(100, 100)
    state = {
        "a": whole,
        "b": whole[10:20],
        "c": {"tied": layer.weight, "again": layer.weight},
        "t": whole.view(500, 100).T,
    }
    io.save_checkpoint(state, tmp_path / "ours.ckpt")
    loaded = io.load_checkpoint(tmp_path / "ours.ckpt")
    torch.save(state, tmp_path / "stock.ckpt")
    assert abs((tmp_path / "ours.ckpt").stat().st_size - (tmp_path / "stock.ckpt").stat().st_size) < 500
    loaded["a"][10:12] = -1
    assert loaded["b"][:2].tolist() == [-1, -1] and loaded["t"].stride() == (1, 100)
    assert loaded["c"]["tied"] is loaded["c"]["again"] and type(loaded["c"]["tied"]) is nn.Parameter


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11, once a process
def test_all_that_torch_can_save_comes_back(io: SnapshotCheckpointIO, tmp_path: Path) -> None:
    state = OrderedDict(
        sparse=torch.eye(3).to_sparse(),
        conjugate=torch.tensor([1 + 2j]).conj(),
        empty=torch.empty(0, 3),
        half=torch.ones(2).half(),
        flags=torch.tensor([True, False]),
    )
    io.save_checkpoint({"s": state, "h": {"args": 1}}, tmp_path / "a.ckpt")
    loaded = io.load_checkpoint(tmp_path / "a.ckpt")["s"]
    assert type(loaded) is OrderedDict and list(loaded) == list(state)
    for name, tensor in state.items():
        back = loaded[name].to_dense() if name == "sparse" else loaded[name]
        assert back.dtype is tensor.dtype and torch.equal(back, tensor.to_dense() if name == "sparse" else tensor)


def test_a_checkpoint_waits_for_room_when_one_is_still_being_written(
    io: SnapshotCheckpointIO, gate: threading.Event, tmp_path: Path
) -> None:
    large, small = {"a": torch.ones(10**5)}, {"a": torch.ones(10**4)}
    io.save_checkpoint(large, tmp_path / "1.ckpt")
    io.save_checkpoint(small, tmp_path / "1.ckpt.sync" / "rank0.ckpt")  # its sidecar need not wait
    start = time.perf_counter()
    threading.Timer(0.3, gate.set).start()
    io.save_checkpoint(large, tmp_path / "2.ckpt")
    assert time.perf_counter() - start > 0.2
    io.wait()
    assert names(tmp_path) == {"1.ckpt", "1.ckpt.sync", "2.ckpt"}


def test_half_written_files_of_a_killed_run_go_and_those_of_a_live_one_stay(
    io: SnapshotCheckpointIO, tmp_path: Path
) -> None:
    (tmp_path / ".epoch=3.ckpt.snapshot.tmp").write_bytes(b"half")
    (tmp_path / ".notes.tmp").write_bytes(b"mine")
    with (tmp_path / ".rank1.ckpt.snapshot.tmp").open("wb") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        io.save_checkpoint({}, tmp_path / "a.ckpt")
        io.wait()
        assert names(tmp_path) == {"a.ckpt", ".notes.tmp", ".rank1.ckpt.snapshot.tmp"}


def test_a_checkpoint_takes_the_place_of_a_link_and_not_of_what_it_points_at(
    io: SnapshotCheckpointIO, tmp_path: Path
) -> None:
    (tmp_path / "best.ckpt").write_bytes(b"best")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    io.save_checkpoint({"a": 1}, tmp_path / "last.ckpt")
    io.wait()
    assert (tmp_path / "best.ckpt").read_bytes() == b"best" and not (tmp_path / "last.ckpt").is_symlink()


def test_files_links_and_folders_are_removed_and_what_is_gone_is_no_error(
    io: SnapshotCheckpointIO, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder", target_is_directory=True)
    for name in ("link", "gone"):
        io.remove_checkpoint(tmp_path / name)
    io.wait()
    assert names(tmp_path) == {"folder"} and names(tmp_path / "folder") == {"a"}
    io.remove_checkpoint(str(tmp_path / "folder"))
    io.wait()
    assert names(tmp_path) == set()


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["torch", "legacy", "pickle"])
def test_code_in_a_checkpoint_is_refused_and_not_run(kind: str, tmp_path: Path) -> None:
    path, ran = tmp_path / "bad.ckpt", tmp_path / "ran"
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"state_dict": Payload(ran)}))
    else:
        torch.save({"state_dict": Payload(ran)}, path, _use_new_zipfile_serialization=kind == "torch")
    holds = "no tensors and plain types alone" if kind == "pickle" else "posix.mkdir"
    with pytest.raises(SnapshotError, match=rf"bad\.ckpt was not loaded: it holds {holds}, and could run code"):
        SnapshotCheckpointIO().load_checkpoint(path)
    with pytest.raises(SnapshotError, match=r"bad\.ckpt was not loaded"):
        run(tmp_path / "run", SnapshotCheckpointIO(), ckpt_path=path)
    with pytest.raises(SnapshotError, match="weights_only=False would run code"):
        SnapshotCheckpointIO().load_checkpoint(path, weights_only=False)
    assert not ran.exists()


def test_a_checkpoint_that_cannot_be_read_says_why(io: SnapshotCheckpointIO, tmp_path: Path) -> None:
    io.save_checkpoint({"a": torch.ones(1000)}, tmp_path / "torn.ckpt")
    io.wait()
    os.truncate(tmp_path / "torn.ckpt", 2000)
    with pytest.raises(SnapshotError, match=r"torn\.ckpt is not a whole checkpoint"):
        io.load_checkpoint(tmp_path / "torn.ckpt")
    (tmp_path / "empty.ckpt").touch()
    with pytest.raises(SnapshotError, match=r"empty\.ckpt is not a whole checkpoint"):
        io.load_checkpoint(tmp_path / "empty.ckpt")
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*gone\.ckpt"):
        io.load_checkpoint(tmp_path / "gone.ckpt")
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    with pytest.raises(FileNotFoundError, match=r"last\.ckpt points at gone\.ckpt, which was not written completely"):
        io.load_checkpoint(tmp_path / "last.ckpt")


def test_remote_addresses_are_refused_unless_asked_for(io: SnapshotCheckpointIO, tmp_path: Path) -> None:
    for work in (io.load_checkpoint, io.remove_checkpoint, lambda path: io.save_checkpoint({}, path)):
        with pytest.raises(SnapshotError, match=r"s3://bucket/last\.ckpt is a remote address"):
            work("s3://bucket/last.ckpt")
    with pytest.raises(SnapshotError, match="takes no storage_options"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", {"key": 1})
    torch.save({"a": 1}, tmp_path / "a.ckpt")
    assert SnapshotCheckpointIO(allow_remote=True).load_checkpoint(f"file://{tmp_path}/a.ckpt") == {"a": 1}
    torch.save({"a": Payload(tmp_path / "ran")}, tmp_path / "bad.ckpt")
    with pytest.raises(SnapshotError, match=r"it holds posix\.mkdir"):
        SnapshotCheckpointIO(allow_remote=True).load_checkpoint(f"file://{tmp_path}/bad.ckpt")


def test_a_checkpoint_of_other_objects_is_copied_too(io: SnapshotCheckpointIO, tmp_path: Path) -> None:
    arguments = Namespace(rates=[1.0], start=torch.zeros(3))
    io.save_checkpoint({"hyper_parameters": arguments}, tmp_path / "a.ckpt")
    arguments.rates.append(2.0)
    arguments.start += 1
    io.wait()
    there = torch.load(tmp_path / "a.ckpt", weights_only=False)["hyper_parameters"]
    assert there.rates == [1.0] and not there.start.any()


def train(rank: int, folder: str, strategy: str, path: str | None) -> Any:
    warnings.simplefilter("ignore")
    plugin = SnapshotCheckpointIO()
    if strategy == "npu_sparse":
        timeout = timedelta(seconds=20)
        given: Any = NPUSparseStrategy(process_group_backend="gloo", timeout=timeout, mode="int3")
    else:
        given = "ddp"
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=1, save_last="link")
    arguments = {"enable_checkpointing": True, "callbacks": [keep], "plugins": [plugin], "max_epochs": 3 if path else 2}
    if path is None:
        fit(rank, Small(), batches=4, strategy=given, devices=2, **arguments)
        return None
    whole, _ = fit(rank, Small(), batches=4, strategy=given, devices=2, max_epochs=3)
    given = NPUSparseStrategy(process_group_backend="gloo", mode="int3") if strategy == "npu_sparse" else "ddp"
    resumed, _ = fit(rank, Small(), batches=4, strategy=given, devices=2, ckpt_path=path, **arguments)
    return whole.flat(), resumed.flat()


@pytest.mark.parametrize("strategy", ["ddp", "npu_sparse"])
def test_two_ranks_save_remove_link_and_resume_to_the_bit(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(train, 2, tmp_path / "first", str(folder), strategy, None, gloo=False)
    left = {"epoch=1.ckpt", "last.ckpt"} | ({"epoch=1.ckpt.sync"} if strategy == "npu_sparse" else set())
    assert names(folder) == left
    if strategy == "npu_sparse":
        assert names(folder / "epoch=1.ckpt.sync") == {"rank0.ckpt", "rank1.ckpt"}
    last = str(folder / "last.ckpt")
    for whole, resumed in run_ranks(train, 2, tmp_path / "second", str(tmp_path / "again"), strategy, last, gloo=False):
        assert torch.equal(whole, resumed)
    shutil.rmtree(folder)


def test_a_file_that_another_rank_finishes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = tmp_path / ".rank1.ckpt.snapshot.tmp"
    left = tmp_path / ".rank2.ckpt.snapshot.tmp"
    left.write_bytes(b"half")
    monkeypatch.setattr(Path, "glob", lambda *_: iter([finished, left]))
    torch_file.remove_unfinished(tmp_path)
    assert not left.exists()
