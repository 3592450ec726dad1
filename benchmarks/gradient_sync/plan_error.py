"""Error of `lightning plan` against runs of npu_sparse between two hosts, on 2 and 4 ranks and two links.

Two network namespaces with a link of the given rate simulate the hosts, with one or two ranks of one thread on each.
The cost model gets the same inputs as from the command's user: the nominal rate, the latency (a small allreduce), the
speed inside a node, and the time of a step without communication while all ranks compute. The bytes per second that a
CPU compresses are calibrated on the runs of CALIBRATION and used for every other run; another column has the
prediction with the constant of lightning_aigc/cluster/workload.py. Times are the slowest rank's, the median over rounds
in which all modes and the step without communication alternate. Error is predicted over measured, minus 1. Needs root
and iproute2.

    python -m benchmarks.gradient_sync.plan_error [--rates 500mbit 200mbit] [--batch 256] [--rounds 5] [--output FILE]
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.rows import keep_row
from benchmarks.gradient_sync.scaling_model import SIZES, forward, make_model, timed_in_turns, train
from benchmarks.gradient_sync.two_hosts import DEVICE, HOSTS, enter, two_hosts
from lightning_aigc.cluster import workload
from lightning_aigc.cluster.cost_model import predict, ring_factor
from lightning_aigc.cluster.workload import Job, Links, Shape
from lightning_aigc.gradient_sync import GradientCompressor

MODES = ("dense", "int8", "int4", "int3", "sparse")
SHAPES = (Shape(2, 1), Shape(2, 2))
INSIDE = ("inside small", "inside large")
FITTED_AT = "500mbit"
CALIBRATION = ((FITTED_AT, Shape(2, 1), "int3"), (FITTED_AT, Shape(2, 1), "int8"))


def measure(rank: int, shape: Shape, rounds: int, batch_size: int, folder: str) -> None:
    """Measure on one rank; rank 0 writes the medians."""
    enter(HOSTS[rank // shape.devices][0])
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=shape.ranks, timeout=timedelta(seconds=120))
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2] if shape.devices == 2 else None
    model, batch = make_model(), torch.randn(batch_size, 1024)
    small, large = (torch.zeros(size) for size in SIZES)

    packing: dict[str, list[float]] = {mode: [] for mode in MODES}

    def train_synced(ddp: nn.Module, compressor: GradientCompressor, mode: str) -> None:
        train(ddp, batch)
        compressor.finish_step()
        if compressor.last_step is not None:
            packing[mode].append(compressor.last_step.packing_ms)

    steps: dict[str, Callable[[], Any]] = {
        "forward": partial(forward, model, batch),
        "compute": partial(train, model, batch),
        "hop": lambda: dist.all_reduce(torch.zeros(1)),
    }
    if inside is not None:
        steps |= {
            name: lambda values=values: dist.all_reduce(values, group=inside)  # type: ignore[misc]
            for name, values in zip(INSIDE, (small, large), strict=True)
        }
    for mode in MODES:
        ddp = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
        compressor = GradientCompressor(mode=mode)  # type: ignore[arg-type]
        compressor.hook_into_model(ddp)
        steps[mode] = partial(train_synced, ddp, compressor, mode)
    times = timed_in_turns(steps, rounds)
    if rank == 0:
        found: dict[str, Any] = {name: statistics.median(of) for name, of in times.items()}
        found["packing_ms"] = {mode: statistics.median(packing[mode] or [0.0]) for mode in MODES}
        found["spread"] = {mode: max(times[mode]) / min(times[mode]) for mode in MODES}
        found["parameters"] = {"all": sum(p.numel() for p in model.parameters())}
        found["parameters"]["small"] = sum(p.numel() for p in model.parameters() if p.dim() < 2)
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def run_ranks(rate: str, shape: Shape, rounds: int, batch_size: int) -> dict[str, Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_aigc", "torch", "lightning_aigc.gradient_sync.compressor"])
    with two_hosts(rate), tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure, args=(rank, shape, rounds, batch_size, folder))
            for rank in range(shape.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    return found


def inputs(found: dict[str, Any], rate: str, shape: Shape) -> tuple[Job, Links]:
    """Inputs of the cost model."""
    counted = found["parameters"]
    job = Job(
        trainable=counted["all"],
        small=counted["small"],
        forward_s=found["forward"],
        backward_s=found["compute"] - found["forward"],
        bucket_bytes=25e6,
        device="cpu",
    )
    hops = 2 * (shape.nodes - 1) + 2 * (shape.devices - 1)
    latency = found["hop"] / hops
    bytes_a_second = float(rate.removesuffix("mbit")) * 1e6 / 8  # as `--link 500Mb`
    links = Links(bytes_a_second, bytes_a_second, latency, latency)
    if INSIDE[1] in found:
        factor = ring_factor(shape.devices) * 4
        fast = factor * (SIZES[1] - SIZES[0]) / max(found[INSIDE[1]] - found[INSIDE[0]], 1e-9)
        alpha = max(0.0, found[INSIDE[0]] - factor * SIZES[0] / fast) / 2
        links = replace(links, local_Bps=fast, latency_local_s=alpha)
    return job, links


def predicted_s(mode: str, found: dict[str, Any], rate: str, shape: Shape, compression_Bps: float) -> float:
    job, links = inputs(found, rate, shape)
    workload.COMPRESSION_BPS["cpu"] = compression_Bps
    return predict(mode, job, shape, links).step_s


def calibrated(runs: dict[tuple[str, Shape], dict[str, Any]]) -> float:
    """Compression rate in bytes per second with the least squared relative error on the calibration runs."""

    def error(speed: float) -> float:
        return math.fsum(
            (predicted_s(mode, runs[rate, shape], rate, shape, speed) / runs[rate, shape][mode] - 1) ** 2
            for rate, shape, mode in CALIBRATION
        )

    return min((1e8 * 1.02**n for n in range(250)), key=error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rates", nargs="+", default=["500mbit", "200mbit"], help=f"as tc writes them; with {FITTED_AT}"
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    shipped = workload.COMPRESSION_BPS["cpu"]
    runs = {
        (rate, shape): run_ranks(rate, shape, options.rounds, options.batch)
        for rate in options.rates
        for shape in SHAPES
    }
    alone = runs[FITTED_AT, SHAPES[0]]["compute"]
    speed = calibrated(runs)
    for (rate, shape), found in runs.items():
        crowding = found["compute"] / alone  # two ranks per core compress at half the speed, as they compute at half
        for mode in MODES:
            predicted = predicted_s(mode, found, rate, shape, speed / crowding)
            with_shipped = predicted_s(mode, found, rate, shape, shipped / crowding)
            row = {
                "benchmark": "plan_error", "torch": torch.__version__,
                "device": f"cpu, {os.cpu_count()} cores, one thread a rank", "rounds": options.rounds,
                "batch": options.batch, "rate": rate, "nodes": shape.nodes, "devices": shape.devices, "mode": mode,
                "is_calibration": (rate, shape, mode) in CALIBRATION,
                "measured_step_s": round(found[mode], 4), "measured_most_over_least": round(found["spread"][mode], 2),
                "step_without_communication_s": round(found["compute"], 4),
                "packing_ms": round(found["packing_ms"][mode], 1),
                "predicted_step_s": round(predicted, 4), "error": round(predicted / found[mode] - 1, 3),
                "error_with_shipped_constant": round(with_shipped / found[mode] - 1, 3),
                "inputs": {name: round(found[name], 5) for name in ("forward", "hop", *INSIDE) if name in found},
                "compression_GBps": round(speed / 1e9, 3),
            }  # fmt: skip
            keep_row(row, options.output)


if __name__ == "__main__":
    main()
