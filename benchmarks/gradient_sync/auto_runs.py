"""Many short runs of `mode: auto` on two ranks: the chosen mode, its step time over plain DDP, and how it ended.

Each run is a pair of new processes that train one model under plain DDP, in a mode that compresses, under `auto`, and
under plain DDP again, with the watchdog of gradient sync on. Over loopback, or over a link of the given rate between
two network namespaces (needs root and iproute2). A run that does not end within `--limit` seconds counts as stuck; the
watchdog's files are kept in `--stalled`.

    python -m benchmarks.gradient_sync.auto_runs [--rate loopback | 200mbit] [--runs 10] [--steps 7] [--output FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.rows import keep_row
from benchmarks.gradient_sync.two_hosts import DEVICE, HOSTS, enter, two_hosts
from lightning_aigc.gradient_sync import GradientCompressor

TIMEOUT = timedelta(seconds=40)
WARM_UP = 2
SIDE = 1024


def make_model(layers: int) -> nn.Sequential:
    """A model of `layers` linear layers with 1.05 M parameters each."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(SIDE, SIDE), nn.GELU())))


def train(model: nn.Module, mode: Any, steps: int, stalled: str) -> tuple[str, float, str]:
    """Train under a new DDP. Returns: the mode, the median step time, and the reason for the choice."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compressor = None
    if mode is not None:
        compressor = GradientCompressor(mode=mode, timeout=TIMEOUT, stall_after_s=5, stall_folder=stalled)
        compressor.hook_into_model(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-3)
    times = []
    for _ in range(WARM_UP + steps):
        batch = torch.randn(64, SIDE)
        dist.barrier()
        start = time.perf_counter()
        ddp(batch).square().mean().backward()
        if compressor is None or compressor.finish_step():
            optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    chosen, why = str(mode), ""
    if compressor is not None:
        chosen, why = compressor.mode, compressor.report().splitlines()[0]
        compressor.close()
    return chosen, statistics.median(times[WARM_UP:]), why


def run_rank(rank: int, folder: str, rate: str, layers: int, steps: int, stalled: str) -> None:
    if rate != "loopback":
        enter(HOSTS[rank][0])
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=TIMEOUT)
    model = make_model(layers)
    found = [train(model, mode, steps, stalled) for mode in (None, "int3", "auto", None)]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def one_run(options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Run two ranks. Returns: the row."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_aigc", "torch", "lightning_aigc.gradient_sync.compressor"])
    stalled = str(options.stalled / f"{options.rate}-{number}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, options.rate, options.layers, options.steps, stalled)
        ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(2)]
        start = time.monotonic()
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, start + options.limit - time.monotonic()))
        stuck = [process for process in ranks if process.is_alive()]
        for process in stuck:
            process.kill()
            process.join()
        ended = "stuck" if stuck else "ended" if all(p.exitcode == 0 for p in ranks) else "failed"
        row: dict[str, Any] = {"run": number, "ended": ended, "seconds": round(time.monotonic() - start, 1)}
        path = Path(folder, "found.json")
        if path.exists():
            before, _, auto, after = json.loads(path.read_text(encoding="utf-8"))
            plain = (before[1] + after[1]) / 2
            row |= {"chose": auto[0], "step_time_ratio": round(auto[1] / plain, 3), "plain_step_s": round(plain, 4)}
            row |= {"plain_before_over_after": round(before[1] / after[1], 3), "why": auto[2]}
    return row | {"reported_a_stall": Path(stalled).exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="loopback")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a run counts as stuck")
    parser.add_argument("--stalled", type=Path, default=Path(tempfile.gettempdir(), "auto_runs"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    about = {
        "benchmark": "auto_runs", "torch": torch.__version__, "rate": options.rate,
        "ranks": 2, "parameters": options.layers * SIDE * (SIDE + 1), "steps": options.steps, "device": "cpu",
        "threads": 1,
    }  # fmt: skip
    endings: Counter[str] = Counter()
    with two_hosts(options.rate) if options.rate != "loopback" else contextlib.nullcontext():
        for number in range(options.runs):
            row = one_run(options, number)
            endings[f"{row['ended']}, chose {row.get('chose', 'nothing')}"] += 1
            keep_row(about | row, options.output)
    print(dict(endings))


if __name__ == "__main__":
    main()
