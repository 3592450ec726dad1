"""Loss of each gradient sync mode: a small latent denoiser, fine-tuned on new data by four ranks.

A class-conditional transformer of 0.4 M parameters denoises 16 tokens of 4 latent channels. It is pretrained on one
distribution and fine-tuned on a shifted one with AdamW, 400 steps of 4 x 16 samples; the loss is on 4096 new samples.
Every mode uses the best learning rate of dense. The four ranks run in one process: the package's reductions run as on
four ranks, with simulated collectives.

    OMP_NUM_THREADS=1 python benchmarks/gradient_quality.py [--modes int3 sparse ...] [--seeds 3] [--output FILE]
"""
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Generator, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from lightning_aigc.gradient_sync.collectives import Traffic, dense_ring_bytes
from lightning_aigc.gradient_sync.flat_units import FlatUnit, make_units
from lightning_aigc.gradient_sync.mode_reductions import make_reduction
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.reductions import Uncompressed

RANKS, BATCH, STEPS, TIMESTEPS = 4, 16, 400, 1000
RATES = (5e-4, 1e-3, 2e-3)
ALPHA_BAR = torch.cos((torch.arange(TIMESTEPS) + 0.5) / TIMESTEPS * math.pi / 2) ** 2
MODES: dict[str, dict[str, Any]] = {
    "bf16": {"mode": "bf16"},
    "int8": {"mode": "int8"},
    "int4": {"mode": "int4"},
    "int3 (default)": {"mode": "int3"},
    "int3, 40 dense steps first": {"mode": "int3", "warmup_steps": 40},
    "int3, no error feedback": {"mode": "int3", "error_feedback": False},
    "two_four": {"mode": "two_four"},
    "sparse 0.5": {"mode": "sparse", "sparsity": 0.5},
    "sparse 0.75": {"mode": "sparse"},
    "sparse 0.75, even layers": {"mode": "sparse", "layer_wise_adaptive": False},
    "sparse 0.75, no error feedback": {"mode": "sparse", "error_feedback": False},
    "sparse_int8 0.75": {"mode": "sparse_int8"},
    "sparse_int8 0.95": {"mode": "sparse_int8", "sparsity": 0.95},
    "sparse_int4 0.75": {"mode": "sparse_int4"},
    "low_rank 16": {"mode": "low_rank", "rank": 16},
    "int4, one step late": {"mode": "int4", "delay_one_step": True},
    "local 4": {"mode": "local", "local_steps": 4},
    "local 8": {"mode": "local"},
    "local 16": {"mode": "local", "local_steps": 16},
}


class Latents:
    """Latents [n, 16, 4] of ten classes, from a random two-layer decoder; `mix` goes from another to a new one."""

    def __init__(self, seed: int, other: Latents | None = None, mix: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = torch.randn(10, 16, generator=generator)
        self.first = torch.randn(24, 128, generator=generator) / 24**0.5
        self.second = torch.randn(128, 64, generator=generator) / 128**0.5 * 1.6
        if other is not None:
            self.first = (1 - mix) ** 0.5 * other.first + mix**0.5 * self.first
            self.second = (1 - mix) ** 0.5 * other.second + mix**0.5 * self.second

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Noisy latents, their noise, timesteps and classes."""
        label = torch.randint(10, (count,), generator=generator)
        hidden = torch.cat([torch.randn(count, 8, generator=generator), self.classes[label]], 1)
        latents = (torch.tanh(hidden @ self.first) @ self.second).view(count, 16, 4)
        timestep = torch.randint(TIMESTEPS, (count,), generator=generator)
        noise = torch.randn(latents.shape, generator=generator)
        signal = ALPHA_BAR[timestep][:, None, None]
        return signal.sqrt() * latents + (1 - signal).sqrt() * noise, noise, timestep.float(), label


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff1, self.ff2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulation(condition)[:, None].chunk(2, -1)
        q, k, v = self.to_qkv(self.norm1(x) * (1 + scale) + shift).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.to_out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.ff2(F.gelu(self.ff1(self.norm2(x))))


class Denoiser(nn.Module):
    def __init__(self, width: int = 96, blocks: int = 3) -> None:
        super().__init__()
        self.conv_in, self.position = nn.Linear(4, width), nn.Parameter(0.1 * torch.randn(16, width))
        self.time1, self.time2, self.label = nn.Linear(64, width), nn.Linear(width, width), nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.conv_out = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        angle = timestep[:, None] * torch.exp(torch.arange(32) * (-math.log(1e4) / 32))
        time_ = self.time2(F.silu(self.time1(torch.cat([angle.sin(), angle.cos()], 1))))
        condition = F.silu(time_ + self.label(label))
        hidden = self.conv_in(x) + self.position
        for block in self.blocks:
            hidden = block(hidden, condition)
        out: Tensor = self.conv_out(self.norm(hidden))
        return out


def loss_of(model: nn.Module, batch: tuple[Tensor, ...], parameters: dict[str, Tensor] | None = None) -> Tensor:
    noisy, noise, timestep, label = batch
    predicted = functional_call(model, parameters or dict(model.named_parameters()), (noisy, timestep, label))
    return F.mse_loss(predicted, noise)


@torch.no_grad()
def evaluate(model: nn.Module, data: Latents) -> float:
    batches = (data.sample(1024, torch.Generator().manual_seed(99 + i)) for i in range(4))
    return statistics.mean(loss_of(model, batch).item() for batch in batches)


def pretrain() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, data, generator = Denoiser(), Latents(0), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1500)
    for _ in range(1500):
        loss_of(model, data.sample(64, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict()


# Four ranks in one process


class VirtualGroup:
    """A rank's side of a process group whose collectives `together` carries out."""

    def __init__(self, rank: int, traffic: Traffic) -> None:
        self.rank, self.size, self.traffic = rank, RANKS, traffic

    def shard(self, tensor: Tensor, rank: int | None = None) -> Tensor:
        return tensor.chunk(RANKS)[self.rank if rank is None else rank]

    def all_reduce(self, tensor: Tensor, kind: str = "values") -> Any:
        return self._count(2 * tensor.nbytes, kind, ("sum", tensor, tensor))

    def all_gather(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Any:
        return self._count(out.nbytes, kind, ("gather", out, tensor))

    def all_to_all(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Any:
        return self._count(tensor.nbytes, kind, ("exchange", out, tensor))

    def _count(self, nbytes: int, kind: str, work: Any) -> Any:
        self.traffic.sent[kind] += (RANKS - 1) / RANKS * nbytes
        return work


class VirtualGroups:
    """What `make_reduction` asks of the process groups."""

    inside = None
    world_size = RANKS


def together(work: list[Generator[Any, None, Any]]) -> list[Any]:
    """Run the same reduction on all ranks, collective by collective."""
    results: list[Any] = [None] * RANKS
    while True:
        started = []
        for rank, reducing in enumerate(work):
            try:
                started.append(next(reducing))
            except StopIteration as end:
                results[rank] = end.value
        if not started:
            return results
        kind, outs, tensors = started[0][0], [s[1] for s in started], [s[2] for s in started]
        if kind == "sum":
            total = sum(tensor.float() for tensor in tensors)
            for out in outs:
                out.copy_(total)
        elif kind == "gather":
            for out in outs:
                torch.cat(tensors, out=out)
        else:
            parts = [tensor.chunk(RANKS) for tensor in tensors]
            for rank, out in enumerate(outs):
                out.copy_(torch.cat([part[rank] for part in parts]))


class VirtualSync:
    """GradientSync's step for four ranks at once, on the package's units and reductions."""

    def __init__(self, model: nn.Module, options: SyncOptions) -> None:
        self.options, self.step = options, 0
        self.delayed: dict[str, Any] | None = None
        named = list(model.named_parameters())
        self.units: list[FlatUnit] = make_units(named, options, RANKS)
        self.traffic = [Traffic() for _ in range(RANKS)]
        self.groups = [VirtualGroup(rank, self.traffic[rank]) for rank in range(RANKS)]
        cpu = torch.device("cpu")
        self.reductions = [make_reduction(options, self.units, VirtualGroups(), cpu) for _ in range(RANKS)]  # type: ignore[arg-type]
        self.residuals = [{unit.index: torch.zeros(unit.numel) for unit in self.units} for _ in range(RANKS)]
        self.numel = sum(p.numel() for _, p in named)

    def mean(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mean of gradients [ranks, ...], as every rank gets it."""
        first = 1 if self.options.mode.startswith("sparse") or self.options.mode == "two_four" else 0
        compressing = self.step >= max(self.options.warmup_steps, first)
        means = {}
        for unit in self.units:
            shares = []
            for rank in range(RANKS):
                flat = self.residuals[rank][unit.index] * self.options.error_feedback
                for entry in unit.entries:
                    flat[entry.start : entry.stop] += gradients[entry.name][rank].reshape(-1) / RANKS
                shares.append(flat)
            uncompressed = unit.uncompressed or not compressing
            reductions = [Uncompressed()] * RANKS if uncompressed else self.reductions
            totals = together([r.reduce(unit, e, g) for r, e, g in zip(reductions, shares, self.groups, strict=True)])  # type: ignore[arg-type]
            for rank in range(RANKS):
                self.residuals[rank][unit.index] = shares[rank]
                if uncompressed and not unit.uncompressed:
                    self.reductions[rank].observe(unit, totals[rank][0])
            total = totals[0][0]
            assert all(torch.equal(total, other) for other, _ in totals), "ranks differ"
            for entry in unit.entries:
                means[entry.name] = total[entry.start : entry.stop].view(entry.shape)
        for reduction in self.reductions:
            reduction.commit()
        self.step += 1
        if not self.options.delay_one_step:
            return means
        delayed, self.delayed = self.delayed, means
        return delayed if delayed is not None else {name: torch.zeros_like(value) for name, value in means.items()}

    def ratio(self) -> float:
        return self.traffic[0].total() / self.step / dense_ring_bytes(self.numel, RANKS)


def fine_tune(start: dict[str, Tensor], seed: int, rate: float, options: dict[str, Any] | None) -> tuple[float, float]:
    """Loss on new samples after fine-tuning, and bytes sent over those of a dense float32 ring."""
    if options is not None and options["mode"] == "local":
        return fine_tune_locally(start, seed, rate, options.get("local_steps", 8))
    model, data = Denoiser(), Latents(1000, Latents(0))
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    sync = None if options is None else VirtualSync(model, SyncOptions(protect=(), **options))
    of_each_rank = vmap(grad(lambda p, *batch: loss_of(model, batch, p)), in_dims=(None, 0, 0, 0, 0))
    for batch in batches_of_ranks(data, seed):
        gradients = of_each_rank({n: p.detach() for n, p in model.named_parameters()}, *batch)
        means = {n: g.mean(0) for n, g in gradients.items()} if sync is None else sync.mean(gradients)
        for name, parameter in model.named_parameters():
            parameter.grad = means[name].clone()
        optimizer.step()
    return evaluate(model, data), 1.0 if sync is None else sync.ratio()


def fine_tune_locally(start: dict[str, Tensor], seed: int, rate: float, every: int) -> tuple[float, float]:
    models, data = [Denoiser() for _ in range(RANKS)], Latents(1000, Latents(0))
    optimizers = []
    for model in models:
        model.load_state_dict(start)
        optimizers.append(torch.optim.AdamW(model.parameters(), rate))
    for step, batch in enumerate(batches_of_ranks(data, seed), 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss_of(model, tuple(part[rank] for part in batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % every == 0:
            with torch.no_grad():
                for together_ in zip(*(model.parameters() for model in models), strict=True):
                    average = torch.stack(list(together_)).mean(0)
                    for parameter in together_:
                        parameter.copy_(average)
    return evaluate(models[0], data), 1 / every


def batches_of_ranks(data: Latents, seed: int) -> Iterator[tuple[Tensor, ...]]:
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
            "benchmark": "gradient_quality", "date": date.today().isoformat(), "torch": torch.__version__,
            "mode": name, "learning_rate": rate, "losses": [round(loss, 5) for loss in losses],
            "mean_loss": round(statistics.mean(losses), 5), "sent_ratio": round(found[0][1], 4),
            "seconds": round(time.perf_counter() - began),
        }  # fmt: skip
        return statistics.mean(losses), row

    dense = {}
    for rate in options.rates:
        dense[rate], row = run("dense", None, rate)
        write(row, options.output)
    best_rate = min(dense, key=dense.__getitem__)
    yardstick = dense[best_rate]
    for name in options.modes:
        loss, row = run(name, MODES[name], best_rate)
        write(row | {"loss_to_best_dense": round(loss / yardstick, 4)}, options.output)


def write(row: dict[str, Any], output: Path | None) -> None:
    print(json.dumps(row), flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
