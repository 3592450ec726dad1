"""Cost of a snapshot in training, compared with Lightning's checkpoint of the same state.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoint.snapshot_cost
    python -m benchmarks.checkpoint.snapshot_cost --device cuda

The state of a LoRA of rank 64 on Stable Diffusion 1.5's attention, 256 matrices, in float32: weights, their moving
average, and AdamW's two moments and step. The baselines are `TorchCheckpointIO`, which `trainer.save_checkpoint` calls,
and plain `torch.save`; neither is durable, while a snapshot is fsynced. All alternate in one run. "blocked" is the time
that training waits, in `save`, and in `finish_copy` before the optimizer step; "late" defers all tensors. "work" is
the share of a training's work (0.3 s of matrix products) that is done while a snapshot is being written, and while
another process, dd, writes the same amount. Host memory is the peak resident set above the level before the first save.

The second row measures the callback: a Trainer with these weights, AdamW and an average, `ExactSnapshot` at each step,
and `trainer.save_checkpoint` of the same state before it. A step's forward works for 0.3 s. Size is that of a
snapshot's folder over the bytes of weights, average and optimizer state.

Prints tables and JSON rows and appends the rows to its file. Medians after warm-up, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import safetensors
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import RESULTS
from benchmarks.common.rows import keep_row
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.checkpoint import SnapshotWriter, newest_complete, pack

RANK = 64
BLOCKS = ((320, 5), (640, 5), (1280, 6))
TEXT = 768
BARS = {"blocked_late_ratio": 0.05, "callback_ratio": 0.05, "host_copies": 1.1, "size_ratio": 1.2}


def shapes() -> list[tuple[int, int]]:
    """Shapes of both LoRA matrices of q, k, v and out in self- and cross-attention."""
    found = []
    for channels, count in BLOCKS:
        inputs = [*[channels] * 4, channels, TEXT, TEXT, channels]
        found += [shape for size in inputs * count for shape in ((RANK, size), (channels, RANK))]
    return found


def make_state(device: str) -> dict[str, Any]:
    torch.manual_seed(0)

    def matrices() -> list[Tensor]:
        return [torch.randn(shape, device=device) for shape in shapes()]

    names = [f"unet.{i}.lora" for i in range(len(shapes()))]
    moments = zip(matrices(), matrices(), strict=True)
    return {
        "state_dict": dict(zip(names, matrices(), strict=True)),
        "ema": dict(zip(names, matrices(), strict=True)),
        "optimizer": {
            "state": {
                i: {"step": torch.tensor(9.0), "exp_avg": a, "exp_avg_sq": b} for i, (a, b) in enumerate(moments)
            },
            "param_groups": [{"lr": 1e-4, "params": list(range(len(names)))}],
        },
    }


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def train_for(seconds: float, device: str) -> float:
    """Matrix products per second: the compute that a snapshot write leaves free."""
    left = torch.randn(256, 256, device=device)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(left, left)
        wait_for(device)
        count += 1
    return count / (time.perf_counter() - start)


def resident_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 2**10
    raise RuntimeError(f"/proc/self/status has no {field}")


def timed(work: Callable[[], object], device: str) -> float:
    wait_for(device)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device = given.device
    state = make_state(device)
    tensors, _ = pack(state)
    state_bytes = sum(tensor.nbytes for tensor in tensors.values())
    late = {tensor.data_ptr() for tensor in tensors.values()}
    store = SnapshotWriter(folder / "snapshots", keep_last=2)
    store.open()

    train_for(0.2, device)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset the peak
    before_mib = resident_mib("VmRSS")
    for step in range(3):
        store.save(step, None, state, deferred=late)
        store.finish_copy()
        store.wait()
    host_copies = (resident_mib("VmHWM") - before_mib) * 2**20 / state_bytes
    size_ratio = store.written_bytes / state_bytes

    stock = TorchCheckpointIO()
    times: dict[str, list[float]] = {
        "lightning": [],
        "torch_save": [],
        "blocked_late": [],
        "blocked": [],
        "durable": [],
    }
    rates: dict[str, list[float]] = {"alone": [], "beside_a_snapshot": [], "beside_dd": []}
    for step in range(3, 3 + given.warm_up + given.repeats):
        times["lightning"].append(timed(lambda: stock.save_checkpoint(state, folder / "stock.ckpt"), device))
        times["torch_save"].append(timed(lambda: torch.save(state, folder / "torch.ckpt"), device))
        os.sync()  # flush their dirty pages first, so that the snapshot does not wait for them
        store.save(2 * step, None, state)
        times["blocked"].append(store.blocked_s)
        store.wait()
        rates["alone"].append(train_for(0.3, device))
        start = time.perf_counter()
        store.save(2 * step + 1, None, state, deferred=late)
        rates["beside_a_snapshot"].append(train_for(0.3, device))
        store.finish_copy()
        times["blocked_late"].append(store.blocked_s)
        store.wait()
        times["durable"].append(time.perf_counter() - start)
        copying = ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=1M", f"count={state_bytes >> 20}", "conv=fsync"]
        with subprocess.Popen(copying, stderr=subprocess.DEVNULL):
            rates["beside_dd"].append(train_for(0.3, device))
    store.close()

    newest = newest_complete(store.directory, print)
    assert newest is not None and newest.step == 2 * step + 1
    read, _ = pack(newest.shared())
    assert all(torch.equal(read[name], tensor.cpu()) for name, tensor in tensors.items())
    row = store_row(times, rates, given.warm_up)
    row |= {"tensors": len(tensors), "trained_values": sum(a * b for a, b in shapes())}
    row["state_mib"] = round(state_bytes / 2**20, 1)
    return row | {"host_copies": round(host_copies, 3), "size_ratio": round(size_ratio, 4)}


def store_row(times: dict[str, list[float]], rates: dict[str, list[float]], warm_up: int) -> dict[str, Any]:
    """Medians after warm-up: seconds, and the work done meanwhile."""
    row: dict[str, Any] = {}
    for name, values in times.items():
        kept = values[warm_up:]
        row[f"{name}_ms"] = round(1e3 * statistics.median(kept), 1)
        row[f"{name}_spread_ms"] = [round(1e3 * min(kept), 1), round(1e3 * max(kept), 1)]
    for name in ("blocked_late", "blocked"):
        row[f"{name}_ratio"] = round(row[f"{name}_ms"] / row["lightning_ms"], 4)
        row[f"{name}_to_torch_save"] = round(row[f"{name}_ms"] / row["torch_save_ms"], 4)
    alone = statistics.median(rates.pop("alone")[warm_up:])
    for name, values in rates.items():
        row[f"work_{name}"] = round(statistics.median(values[warm_up:]) / alone, 3)
    return row


class Lora(LightningModule):
    """Train these matrices with a forward that takes `forward_s` seconds, and average them."""

    deferred_snapshot_keys = ("ema",)

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lora = nn.ParameterList(torch.randn(shape) for shape in shapes())
        self.forward_s = forward_s
        self.average: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        train_for(self.forward_s, self.device.type)
        return torch.stack([matrix.square().mean() for matrix in self.lora]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)

    def on_train_start(self) -> None:
        self.average = [matrix.detach().clone() for matrix in self.lora]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        torch._foreach_lerp_(self.average, [matrix.detach() for matrix in self.lora], 0.005)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ema"] = {"shadow_params": self.average}


class SaveToo(Callback):
    """Time Lightning's checkpoint of each step's state, directly before its snapshot."""

    def __init__(self, folder: Path, snapshots: ExactSnapshot) -> None:
        self.path, self.snapshots = folder / "stock.ckpt", snapshots
        self.times: list[float] = []
        self.state_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.snapshots.wait()
        assert isinstance(pl_module, Lora)
        self.times.append(timed(lambda: trainer.save_checkpoint(self.path), pl_module.device.type))
        os.sync()
        optimizer = [v for state in trainer.optimizers[0].state.values() for v in state.values()]
        self.state_bytes = sum(t.nbytes for t in (*pl_module.lora, *pl_module.average, *optimizer))


def measure_callback(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    snapshots = ExactSnapshot(every_n_steps=1, keep_last=2)
    beside = SaveToo(folder, snapshots)
    steps = given.warm_up + given.repeats
    trainer = Trainer(
        accelerator="cpu" if given.device == "cpu" else "gpu", devices=1, max_steps=steps, max_epochs=-1,
        default_root_dir=folder, callbacks=[snapshots, beside], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, inference_mode=False,
    )  # fmt: skip
    trainer.fit(Lora(0.3), DataLoader(torch.zeros(steps, 1)))  # type: ignore[arg-type]
    newest = newest_complete(folder / "snapshots", print)
    assert newest is not None and newest.step == steps
    size = sum(path.stat().st_size for path in newest.path.iterdir())
    kept = {"save_checkpoint": beside.times[given.warm_up :], "callback": snapshots.blocked_s[given.warm_up :]}
    row: dict[str, Any] = {"of": "callback", "state_mib": round(beside.state_bytes / 2**20, 1)}
    for name, values in kept.items():
        row[f"{name}_ms"] = round(1e3 * statistics.median(values), 1)
        row[f"{name}_spread_ms"] = [round(1e3 * min(values), 1), round(1e3 * max(values), 1)]
    row["callback_ratio"] = round(row["callback_ms"] / row["save_checkpoint_ms"], 4)
    return row | {"snapshots": len(kept["callback"]), "size_ratio": round(size / beside.state_bytes, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--what", nargs="+", choices=("store", "callback"), default=["store", "callback"])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to write; unset: a temporary folder")
    parser.add_argument("--output", type=Path, default=RESULTS / "checkpoint" / "snapshot_cost.jsonl")
    given = parser.parse_args()
    measures = {"store": measure, "callback": measure_callback}
    for what in given.what:
        folder = Path(tempfile.mkdtemp(prefix="snapshot-cost-", dir=given.folder))
        try:
            row = measures[what](given, folder)
        finally:
            shutil.rmtree(folder)
        report(row, given)


def report(row: dict[str, Any], given: argparse.Namespace) -> None:
    where = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    device = torch.get_device_module(given.device).get_device_name() if given.device != "cpu" else "cpu"
    row |= {
        "device": f"{device} {where}",
        "load": round(os.getloadavg()[0], 2),
        "versions": {m.__name__: m.__version__ for m in (torch, lightning.pytorch, safetensors)},
    }
    print("| " + " | ".join(f"{key} (bar {BARS[key]})" if key in BARS else key for key in row) + " |")
    print("|" + "---|" * len(row))
    print("| " + " | ".join(str(value) for value in row.values()) + " |")
    keep_row({"benchmark": "snapshot_cost", **row}, given.output)


if __name__ == "__main__":
    main()
