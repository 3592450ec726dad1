"""Checkpoints of `npu_sparse`: residuals lie beside the file, are removed with it, and are loaded again."""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision

from fakes.models.small_lightning import Small, fit
from fakes.processes.given_gradients import MODES
from fakes.processes.ranks import run_ranks
from lightning_aigc.checkpoint import async_checkpoint_io
from lightning_aigc.strategies import NPUSparseStrategy
from lightning_aigc.strategies.sync_checkpoint import SyncCheckpoint

SHAPES = {"net.0.weight": (64, 40), "net.2.weight": (40, 64), "head.weight": (40, 40)}
RUNS: dict[str, dict[str, Any]] = {mode: {"mode": mode, "local_steps": 3} for mode in MODES}
RUNS |= {"local int3": {"mode": "local", "local_steps": 3, "average": "int3"}}
RUNS |= {"overlapped averages": {"mode": "local", "local_steps": 3, "average": "int3", "overlap_average": True}}
RUNS |= {"local top_k": {"mode": "local", "local_steps": 3, "average": "top_k", "outer_momentum": 0.5}}
RUNS["overlapped top_k"] = RUNS["local top_k"] | {"top_k": 1000, "error_feedback_decay": 0.95, "overlap_average": True}
RUNS |= {"outer momentum": {"mode": "local", "local_steps": 2, "outer_momentum": 0.5}}
RUNS |= {"16-mixed": {"mode": "sparse"}}
WITH_RESIDUALS = ("int3", "sparse")


class Residuals(Callback):
    """Keeps the residuals of this rank before the first step."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        state = trainer.strategy.sync.state_dict()
        self.values = {name: part["values"] for name, part in state["residuals"].items()}


class Heard(logging.Handler):
    """Lightning's messages at level info."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.INFO)
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(
    rank: int, ranks: int, options: dict[str, Any], *, epochs: int = 2, precision: str = "32", **arguments: Any
) -> Any:
    warnings.simplefilter("ignore")
    strategy = NPUSparseStrategy(process_group_backend="gloo", timeout=timedelta(seconds=20), **options)
    plugins = [MixedPrecision("16-mixed", "cpu")] if precision == "16-mixed" else []
    return fit(
        rank, Small(), batches=4, strategy=strategy, devices=ranks, max_epochs=epochs, plugins=plugins, **arguments
    )


def saving(folder: Path, **arguments: Any) -> dict[str, Any]:
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", **({"save_top_k": -1} | arguments))
    return {"enable_checkpointing": True, "callbacks": [checkpoint]}


def two(rank: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, options in RUNS.items():
        precision = "16-mixed" if name == "16-mixed" else "32"
        place = Path(folder, name)
        whole, trainer = run(rank, 2, options, precision=precision, **saving(place))
        residuals = Residuals()
        first = place / "epoch=0.ckpt"
        resumed, again = run(rank, 2, options, precision=precision, ckpt_path=first, callbacks=[residuals])
        results[name] = [whole.after[4:], resumed.after, whole.flat(), resumed.flat(), residuals.values]
        results[name] += [[t.optimizers[0].state_dict()["state"][0]["exp_avg"] for t in (trainer, again)]]

    heard = Heard()
    best = saving(Path(folder, "best"), save_top_k=1, monitor="loss", mode="min", save_last="link")
    run(rank, 2, {"mode": "int3"}, epochs=3, **best)
    residuals = Residuals()
    run(rank, 2, {"mode": "int3"}, epochs=4, ckpt_path=Path(folder, "best", "last.ckpt"), callbacks=[residuals])
    results["linked"] = residuals.values

    for what, path, spoil in (
        ("missing", "int3/epoch=0.ckpt.sync/rank1.ckpt", lambda path: path.unlink()),
        ("stale", "int4/epoch=0.ckpt.sync/rank0.ckpt", lambda path: path.write_bytes(later(path).read_bytes())),
    ):
        if rank == 0:
            spoil(Path(folder, path))
        torch.distributed.barrier()
        heard.lines.clear()
        mode = path.partition("/")[0]
        module, _ = run(rank, 2, {"mode": mode}, ckpt_path=Path(folder, mode, "epoch=0.ckpt"), callbacks=[residuals])
        results[what] = [list(heard.lines), module.after, residuals.values]
    heard.lines.clear()
    run(rank, 2, {"mode": "dense"}, ckpt_path=Path(folder, "int8", "epoch=0.ckpt"))
    results["to dense"] = list(heard.lines)
    heard.lines.clear()
    run(rank, 2, {"mode": "int4"}, ckpt_path=Path(folder, "local", "epoch=0.ckpt"))
    results["from local"] = [
        list(heard.lines),
        run(rank, 2, {"mode": "int4"}, ckpt_path=Path(folder, "local", "epoch=0.ckpt"))[0].after,
    ]
    return results


def later(path: Path) -> Path:
    return Path(str(path).replace("epoch=0", "epoch=1"))


def slow_sidecars(rank: int, folder: str) -> list[list[bool]]:
    """Flags for each removal of an old checkpoint on rank 0: whether rank 1's file of the newer one was there."""
    found: list[bool] = []
    if rank == 0:
        stock = shutil.rmtree

        def rmtree(path: Any) -> None:
            newer = Path(str(path).replace("epoch=0", "epoch=1") if "epoch=0" in str(path) else folder)
            found.append((newer / "rank1.ckpt").exists() or newer == Path(folder))
            stock(path)

        shutil.rmtree = rmtree  # type: ignore[assignment]
    else:
        write = async_checkpoint_io.write_torch_file
        async_checkpoint_io.write_torch_file = lambda *arguments: (time.sleep(0.5), write(*arguments))  # type: ignore[assignment]
    run(
        rank,
        2,
        {"mode": "int3", "checkpoint_io": async_checkpoint_io.SnapshotCheckpointIO()},
        **saving(Path(folder, "c"), save_top_k=1),
    )
    return found


def other_number(rank: int, ranks: int, folder: str, write: bool) -> dict[str, Any]:
    """Save on these many ranks, or resume on them what others have saved."""
    results = {}
    for mode in WITH_RESIDUALS:
        place = Path(folder, f"{mode} of other ranks")
        if write:
            run(rank, ranks, {"mode": mode}, epochs=1, **saving(place))
        else:
            residuals = Residuals()
            module, _ = run(rank, ranks, {"mode": mode}, ckpt_path=place / "epoch=0.ckpt", callbacks=[residuals])
            results[mode] = [residuals.values, module.after]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def both(folder: Path) -> list[Any]:
    return run_ranks(two, 2, folder, str(folder), gloo=False)


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(name: str, both: list[Any]) -> None:
    for row in both:
        whole, resumed, end, end_again, _, (moment, moment_again) = row[name]
        assert len(resumed) == 4
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
        assert torch.equal(end, end_again) and torch.equal(moment, moment_again)
    assert torch.equal(both[0][name][2], both[1][name][2])  # after training, mode local too


@pytest.mark.parametrize("name", ["int3", "sparse", "two_four"])
def test_the_files_hold_each_ranks_residuals_and_load_without_code(name: str, folder: Path, both: list[Any]) -> None:
    path = folder / name / "epoch=0.ckpt"
    assert torch.load(path, weights_only=True)["npu_sparse"]["world_size"] == 2
    for rank, row in enumerate(both):
        if name == "int3" and rank == 1:
            continue  # another test's missing file
        state = torch.load(folder / name / "epoch=0.ckpt.sync" / f"rank{rank}.ckpt", weights_only=True)
        assert SHAPES.keys() < state["residuals"].keys() == row[name][4].keys()  # and the biases
        for parameter, part in state["residuals"].items():
            assert torch.equal(part["values"], row[name][4][parameter])
            assert part["values"].any() or parameter not in SHAPES


def test_a_checkpoint_that_goes_takes_its_sync_state_along(folder: Path, both: list[Any]) -> None:
    left = {path.name for path in (folder / "best").iterdir()}
    (kept,) = (name for name in left if name.startswith("epoch") and name.endswith(".ckpt"))
    assert left == {kept, f"{kept}.sync", "last.ckpt"}


def test_the_link_to_the_last_checkpoint_finds_its_sync_state(both: list[Any]) -> None:
    assert all(values.any() for row in both for values in row["linked"].values())


@pytest.mark.parametrize(
    ("what", "mode", "words"),
    [
        ("missing", "int3", "another rank misses its sync state"),
        ("stale", "int4", "has no complete sync state: its files are of another step than the checkpoint"),
    ],
)
def test_sync_state_that_is_not_whole_is_named_and_no_rank_uses_its_part(
    what: str, mode: str, words: str, both: list[Any]
) -> None:
    said, after, _ = both[0][what]
    (line,) = (line for line in said if "residuals of 2 ranks are lost" in line)
    assert words in line and "the residuals of 2 ranks are lost, and compression starts anew" in line
    for row in both:
        assert not any(values.any() for values in row[what][2].values())
    assert all(torch.equal(a, b) for a, b in zip(after, both[1][what][1], strict=True))


def test_going_on_in_mode_dense_says_that_residuals_are_dropped(both: list[Any]) -> None:
    assert any("its residuals are dropped by mode dense" in line for line in both[0]["to dense"])


def test_going_on_from_local_steps_every_rank_takes_the_same_optimizer_state(both: list[Any]) -> None:
    said, after = both[0]["from local"]
    assert any("the checkpoint was written in mode local, this run is in int4" in line for line in said)
    assert all(torch.equal(a, b) for a, b in zip(after, both[1]["from local"][1], strict=True))


def test_an_old_checkpoint_stays_until_every_ranks_part_of_the_newer_one_is_durable(tmp_path: Path) -> None:
    found, _ = run_ranks(slow_sidecars, 2, tmp_path / "ranks", str(tmp_path), gloo=False)
    assert found == [True]
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"epoch=1.ckpt", "epoch=1.ckpt.sync"}


@pytest.mark.parametrize(("before", "now"), [(2, 4), (4, 2)])
def test_other_numbers_of_ranks_share_out_the_sum_of_the_residuals(before: int, now: int, tmp_path: Path) -> None:
    run_ranks(other_number, before, tmp_path / "before", before, str(tmp_path), True, gloo=False)
    rows = run_ranks(other_number, now, tmp_path / "now", now, str(tmp_path), False, gloo=False)
    for mode in WITH_RESIDUALS:
        place = tmp_path / f"{mode} of other ranks" / "epoch=0.ckpt.sync"
        saved = [torch.load(place / f"rank{rank}.ckpt", weights_only=True)["residuals"] for rank in range(before)]
        for name in SHAPES:
            residuals = torch.stack([state[name]["values"].double() for state in saved]).sum(0)
            taken = torch.stack([row[mode][0][name].double() for row in rows]).sum(0)
            torch.testing.assert_close(taken, residuals, rtol=1e-6, atol=1e-9)
            assert residuals.any()
        for row in rows[1:]:
            assert all(torch.equal(a, b) for a, b in zip(row[mode][1], rows[0][mode][1], strict=True))


def test_a_remote_folder_holds_the_sync_state_beside_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    groups = SimpleNamespace(world_size=2, rank=1)
    sync: Any = SimpleNamespace(
        groups=groups,
        has_rank_local_parameters=False,
        needs_all_states=lambda state: False,
        state_dict=lambda: {"residuals": {"w": torch.ones(3)}},
    )
    io, where = TorchCheckpointIO(), "memory://run/last.ckpt"
    written = SyncCheckpoint().save(io, sync, {"global_step": 4}, where)
    files = fsspec.filesystem("memory")
    assert files.exists("/run/last.ckpt.sync/rank1.ckpt") and list(tmp_path.iterdir()) == []

    read = SyncCheckpoint()
    read.load(io, written, where, 1, 2, own_optimizers=False)
    loaded: list[Any] = []
    sync.load_state_dict = lambda states: loaded.extend(states) or []
    assert read.apply(sync, lambda yes: yes) == []
    assert torch.equal(loaded[0]["residuals"]["w"], torch.ones(3))
    read.remove(io, where)
    assert not files.exists("/run/last.ckpt.sync")
