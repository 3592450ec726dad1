"""Error of the cost model of `lightning plan`: its prediction against plain DDP over gloo on one machine.

    python -m benchmarks.gradient_sync.scaling_model

A model of about 10 M parameters, one thread per rank, loopback; 1, 2 and 4 ranks. The cost model's inputs are measured
on the same ranks, alternating with the DDP step to predict, so that other load affects all alike:

* the step without communication, with all ranks computing at once: with fewer cores than ranks, the cost of sharing
  them counts as computation;
* two sizes of allreduce, to fit alpha and beta.

Times are the slowest rank's, median over rounds. The error is predicted over measured, minus 1, twice: with the model's
overlap share, and without overlap, because gloo moves bytes on the cores that compute. Prints a row per number of ranks
and appends it to its file.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from benchmarks import RESULTS
from benchmarks.common.rows import keep_row
from lightning_aigc.cluster.cost_model import predict
from lightning_aigc.cluster.workload import OVERLAP_SHARE, Job, Links, Shape

SIZES = (2**14, 2**23)
"""Elements of the two allreduces that alpha and beta are fitted to."""
WARM_UP = 3


def make_model() -> nn.Sequential:
    """A model of 12.6 M parameters with a backward that is long enough to overlap communication."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.GELU())))


def slowest_s(step: Callable[[], Any]) -> float:
    """Seconds of the slowest rank; all ranks start together."""
    dist.barrier()
    started = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def forward(model: nn.Module, batch: Tensor) -> None:
    with torch.no_grad():
        model(batch)


def train(module: nn.Module, batch: Tensor) -> None:
    """One step without an optimizer."""
    module.zero_grad()
    module(batch).square().mean().backward()


def timed_in_turns(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step on the slowest rank; all steps alternate in every round, so that load affects them alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(WARM_UP + rounds):
        for name, step in steps.items():
            took = slowest_s(step)
            if i >= WARM_UP:
                times[name].append(took)
    return times


def measure(rank: int, ranks: int, repeats: int, store: str, out: str) -> None:
    """Measure on one rank; rank 0 writes the medians."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model, batch = make_model(), torch.randn(256, 1024)
    ddp = nn.parallel.DistributedDataParallel(make_model())
    small, large = (torch.zeros(size) for size in SIZES)

    steps: dict[str, Callable[[], Any]] = {
        "forward_s": partial(forward, model, batch),
        "compute_s": partial(train, model, batch),
        "ddp_s": partial(train, ddp, batch),
        "small_s": lambda: dist.all_reduce(small),
        "large_s": lambda: dist.all_reduce(large),
    }
    times = timed_in_turns(steps, repeats)
    if rank == 0:
        found = {name: statistics.median(of) for name, of in times.items()}
        found |= {"spread": max(times["ddp_s"]) / min(times["ddp_s"])}
        found |= {"trainable": sum(p.numel() for p in model.parameters())}
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def run_ranks(ranks: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "found.json")
        spawn(measure, args=(ranks, repeats, str(Path(folder) / "store"), out), nprocs=ranks)
        found: dict[str, float] = json.loads(Path(out).read_text(encoding="utf-8"))
    return found


def fitted_links(found: dict[str, float], ranks: int) -> Links:
    """Links whose alpha and beta reproduce the times of the two allreduces."""
    factor = 2 * (ranks - 1) / ranks
    beta = factor * 4 * (SIZES[1] - SIZES[0]) / max(found["large_s"] - found["small_s"], 1e-9)
    alpha = max(0.0, found["small_s"] - factor * 4 * SIZES[0] / beta) / (2 * (ranks - 1))
    return Links(local_Bps=beta, between_Bps=beta, latency_local_s=alpha)


def predicted_s(found: dict[str, float], ranks: int, overlap_share: float) -> float:
    """Predicted step time, from the step without communication and the fitted links."""
    job = Job(
        trainable=found["trainable"],
        forward_s=found["forward_s"],
        backward_s=found["compute_s"] - found["forward_s"],
        overlap_share=overlap_share,
        device="cpu",
    )
    return predict("dense", job, Shape(1, ranks), fitted_links(found, ranks)).step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS / "gradient_sync" / "scaling_model.jsonl")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    single = run_ranks(1, given.repeats)["compute_s"]
    for ranks in (2, 4):
        found = run_ranks(ranks, given.repeats)
        hidden, bare = (predicted_s(found, ranks, share) for share in (OVERLAP_SHARE, 0.0))
        links = fitted_links(found, ranks)
        row = {
            "case": "plain DDP, gloo over loopback",
            "ranks": ranks,
            "trainable": int(found["trainable"]),
            "step_of_one_rank_s": round(single, 4),
            "step_without_communication_s": round(found["compute_s"], 4),
            "measured_step_s": round(found["ddp_s"], 4),
            "measured_most_over_least": round(found["spread"], 2),
            "predicted_step_s": round(hidden, 4),
            "error": round(hidden / found["ddp_s"] - 1, 3),
            "predicted_step_without_overlap_s": round(bare, 4),
            "error_without_overlap": round(bare / found["ddp_s"] - 1, 3),
            "fitted_alpha_us": round(links.latency_local_s * 1e6, 1),
            "fitted_beta_GBps": round(links.local_Bps / 1e9, 3),
            "repeats": given.repeats,
            "device": f"cpu {platform.machine()}, {os.cpu_count()} cores, one thread a rank",
            "versions": {"torch": importlib.metadata.version("torch"), "python": platform.python_version()},
        }
        keep_row(row, given.output)


if __name__ == "__main__":
    main()
