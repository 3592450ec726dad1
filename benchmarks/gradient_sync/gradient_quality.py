"""Loss of each gradient sync mode: a small latent denoiser, fine-tuned on new data by four ranks.

A class-conditional transformer of 0.4 M parameters denoises 16 tokens of 4 latent channels. It is pretrained on one
distribution and fine-tuned on a shifted one with AdamW, 400 steps of 4 x 16 samples; the loss is on 4096 new samples.
Every mode uses the best learning rate of dense. The four ranks run in one process: the package's reductions run as on
four ranks, with simulated collectives.

    OMP_NUM_THREADS=1 python -m benchmarks.gradient_sync.gradient_quality [--modes int3 sparse ...] [--seeds 3]
        [--output FILE]
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from benchmarks.common.rows import keep_row
from benchmarks.common.toy_denoiser import Denoiser, Latents, evaluate, loss_of, pretrain
from benchmarks.common.virtual_ranks import RANKS, VirtualGroups, VirtualSync, run_together
from lightning_aigc.cluster.modes import AVERAGE_HOPS
from lightning_aigc.gradient_sync.modes.local_sgd import LocalSGD
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.transport.collectives import dense_ring_bytes

BATCH, STEPS = 16, 400
RATES = (5e-4, 1e-3, 2e-3)
MODES: dict[str, dict[str, Any]] = {
    "bf16": {"mode": "bf16"},
    "int8": {"mode": "int8"},
    "int4": {"mode": "int4"},
    "int3 (default)": {"mode": "int3"},
    "int3, 40 dense steps first": {"mode": "int3", "warmup_steps": 40},
    "int3, no error feedback": {"mode": "int3", "error_feedback": False},
    "ternary": {"mode": "ternary"},
    "two_four": {"mode": "two_four"},
    "sparse 0.5": {"mode": "sparse", "sparsity": 0.5},
    "sparse 0.75": {"mode": "sparse"},
    "sparse 0.75, even layers": {"mode": "sparse", "layer_wise_adaptive": False},
    "sparse 0.75, no error feedback": {"mode": "sparse", "error_feedback": False},
    "sparse_int8 0.75": {"mode": "sparse_int8"},
    "sparse_int8 0.95": {"mode": "sparse_int8", "sparsity": 0.95},
    "sparse_int4 0.75": {"mode": "sparse_int4"},
    "local 4": {"mode": "local", "local_steps": 4},
    "local 8": {"mode": "local"},
    "local 16": {"mode": "local", "local_steps": 16},
    "local 2 int3": {"mode": "local", "local_steps": 2, "average": "int3"},
    "local 4 int3": {"mode": "local", "local_steps": 4, "average": "int3"},
    "local 8 int3": {"mode": "local", "average": "int3"},
    "local 4 int3, overlapped": {"mode": "local", "local_steps": 4, "average": "int3", "overlap_average": True},
    "local 8 int3, overlapped": {"mode": "local", "average": "int3", "overlap_average": True},
    "local 4 int4": {"mode": "local", "local_steps": 4, "average": "int4"},
    "local 4 int8": {"mode": "local", "local_steps": 4, "average": "int8"},
}


def fine_tune(start: dict[str, Tensor], seed: int, rate: float, options: dict[str, Any] | None) -> tuple[float, float]:
    """Fine-tune. Returns: the loss on new samples, and sent bytes over those of a dense float32 ring."""
    if options is not None and options["mode"] == "local":
        return fine_tune_locally(start, seed, rate, SyncOptions(**options))
    model, data = Denoiser(), Latents(1000, Latents(0))
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    sync = None if options is None else VirtualSync(model, SyncOptions(protect=(), **options))
    rank_gradients = vmap(grad(lambda p, *batch: loss_of(model, batch, p)), in_dims=(None, 0, 0, 0, 0))
    for batch in batches_of_ranks(data, seed):
        gradients = rank_gradients({n: p.detach() for n, p in model.named_parameters()}, *batch)
        means = {n: g.mean(0) for n, g in gradients.items()} if sync is None else sync.mean(gradients)
        for name, parameter in model.named_parameters():
            parameter.grad = means[name].clone()
        optimizer.step()
    return evaluate(model, data), 1.0 if sync is None else sync.ratio()


def fine_tune_locally(start: dict[str, Tensor], seed: int, rate: float, options: SyncOptions) -> tuple[float, float]:
    """The same in mode local: ranks step alone, and LocalSGD averages their parameters."""
    models, data = [Denoiser() for _ in range(RANKS)], Latents(1000, Latents(0))
    for model in models:
        model.load_state_dict(start)
    optimizers = [torch.optim.AdamW(model.parameters(), rate) for model in models]
    groups = [VirtualGroups(rank) for rank in range(RANKS)]
    named = [list(model.named_parameters()) for model in models]
    syncs = [LocalSGD(of_rank, options, g) for of_rank, g in zip(named, groups, strict=True)]  # type: ignore[arg-type]
    flight: list[Any] = []
    for step, batch in enumerate(batches_of_ranks(data, seed), 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss_of(model, tuple(part[rank] for part in batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if options.overlap_average and (step % options.local_steps == AVERAGE_HOPS or step == STEPS) and flight:
            land(syncs, *flight)
            flight = []
        if step % options.local_steps == 0 and options.overlap_average and step < STEPS:
            flight = take_off(syncs)
        elif step % options.local_steps == 0:
            run_together([sync.averaging() for sync in syncs])
    numel = sum(p.numel() for _, p in named[0])
    return evaluate(models[0], data), groups[0].traffic.total() / STEPS / dense_ring_bytes(numel, RANKS)


@torch.no_grad()
def take_off(syncs: list[LocalSGD]) -> list[Any]:
    """Start an overlapped average. Returns: its sums, and the parameters of the ranks by name."""
    start = [{name: p.detach().clone() for name, p in sync.parameters} for sync in syncs]
    return [run_together([sync._summing() for sync in syncs]), start]


@torch.no_grad()
def land(syncs: list[LocalSGD], totals: list[Tensor], starts: list[dict[str, Tensor]]) -> None:
    for sync, total, start in zip(syncs, totals, starts, strict=True):
        sync._step_outwards(total, start)


def batches_of_ranks(data: Latents, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches [ranks, batch, ...], each rank's from its own generator."""
    generators = [torch.Generator().manual_seed(100 * seed + rank) for rank in range(RANKS)]
    for _ in range(STEPS):
        yield tuple(torch.stack(parts) for parts in zip(*(data.sample(BATCH, g) for g in generators), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = pretrain()

    def run(name: str, mode: dict[str, Any] | None, rate: float) -> tuple[float, dict[str, Any]]:
        began = time.perf_counter()
        found = [fine_tune(start, seed, rate, mode) for seed in range(options.seeds)]
        losses = [loss for loss, _ in found]
        row = {
            "benchmark": "gradient_quality", "torch": torch.__version__,
            "mode": name, "learning_rate": rate, "losses": [round(loss, 5) for loss in losses],
            "mean_loss": round(statistics.mean(losses), 5), "sent_ratio": round(found[0][1], 4),
            "seconds": round(time.perf_counter() - began),
        }  # fmt: skip
        return statistics.mean(losses), row

    dense = {}
    for rate in options.rates:
        dense[rate], row = run("dense", None, rate)
        keep_row(row, options.output)
    best_rate = min(dense, key=dense.__getitem__)
    yardstick = dense[best_rate]
    for name in options.modes:
        loss, row = run(name, MODES[name], best_rate)
        keep_row(row | {"loss_to_best_dense": round(loss / yardstick, 4)}, options.output)


if __name__ == "__main__":
    main()
