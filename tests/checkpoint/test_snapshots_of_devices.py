"""States on an accelerator: copied in the order of its work, and never copied on the device itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.npu import fake_npu
from fakes.processes.ranks import run_ranks
from fakes.runs.snapshot_states import same
from lightning_aigc.checkpoint import SnapshotCheckpointIO, SnapshotWriter, find_snapshots


def on_fake_npu(rank: int, folder: str) -> list[Any]:
    fake_npu.install()
    torch.manual_seed(0)
    on_host = {"a": torch.randn(3, 5), "b": torch.randn(6, 4).bfloat16().T, "c": torch.tensor(7), "e": torch.empty(0)}
    state = {name: tensor.to("npu") for name, tensor in on_host.items()} | {"host": torch.ones(2)}
    store = SnapshotWriter(Path(folder, "snapshots"))
    store.open()
    store.save(1, state, {"bias": torch.nn.Parameter(torch.ones(3, device="npu"))})
    state["a"].zero_()
    store.close()
    io = SnapshotCheckpointIO()
    io.save_checkpoint(state, Path(folder, "a.ckpt"))
    io.teardown()
    return [on_host]


def test_a_state_on_npu_is_saved_as_on_the_cpu(tmp_path: Path) -> None:
    ((on_host,),) = run_ranks(on_fake_npu, 1, tmp_path / "rank", str(tmp_path), gloo=False)
    (snapshot,) = find_snapshots(tmp_path / "snapshots")
    assert same(snapshot.rank(0), on_host | {"host": torch.ones(2)})
    assert same(snapshot.shared(), {"bias": torch.ones(3)})
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)  # in a process that knows no npu
    assert not saved["a"].any() and torch.equal(saved["b"], on_host["b"]) and saved["b"].device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_work_queued_before_is_in_the_snapshot_and_work_queued_after_is_not(late: bool, tmp_path: Path) -> None:
    weights = torch.zeros(64 * 2**20, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    store = SnapshotWriter(tmp_path)
    store.open()
    for step in range(3):
        weights.fill_(step)
        for _ in range(20):
            busy = torch.mm(busy, busy).clamp_(-1, 1)
        weights.add_(0.5)  # queued behind all that
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        store.save(step, {"weights": weights}, deferred=[weights.data_ptr()] if late else ())
        if late:
            store.finish_copy()
        weights.fill_(-1)
        store.wait()
        assert torch.cuda.max_memory_allocated() == before
        (saved,) = (snapshot for snapshot in find_snapshots(tmp_path) if snapshot.step == step)
        assert (saved.rank(0)["weights"] == step + 0.5).all()
    assert all(slab.is_pinned() for slab in store._buffers["rank0"]._slabs)
    store.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_checkpoint_is_copied_without_memory_of_the_device(tmp_path: Path) -> None:
    weights = torch.ones(2**20, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    io = SnapshotCheckpointIO()
    io.save_checkpoint({"a": weights, "part": weights[:10]}, tmp_path / "a.ckpt")
    weights.zero_()
    io.teardown()
    assert torch.cuda.max_memory_allocated() == before
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["a"].device.type == "cpu" and saved["a"].all() and saved["part"].all()
