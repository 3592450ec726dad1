"""The variants of gradient sync that `two_hosts.py` compares, and how a step of each is timed."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gradient_sync.two_hosts_networks import Task
from lightning_aigc.gradient_sync import GradientCompressor

WARM_UP = 3
TIMEOUT = timedelta(seconds=120)


def measure(variant: str, task: Task, generator: torch.Generator, steps: int, fused: bool = False) -> dict[str, Any]:
    """Train for `steps` steps after the warm-up.

    Args: fused: whether AdamW is torch's fused one.
    Returns: the median step time, every step's time, and the medians of a step's parts; for npu_sparse's modes, also
        the figures of its report.
    """
    bucket_mb = 1e4 if variant == "powersgd_hook" else 25  # over Gloo torch's PowerSGD aborts with two buckets
    ddp = DistributedDataParallel(task.module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    compressor = add_sync(variant, ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-5, fused=fused)
    times = []
    parts: dict[str, list[float]] = {}
    for _ in range(WARM_UP + steps):
        dist.barrier()
        start = time.perf_counter()
        loss = task.loss(ddp, generator)
        forward_end = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        if compressor is not None:
            compressor.finish_step()
        backward_end = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        times.append(end - start)
        report = None if compressor is None else compressor.last_step
        exposed_ms = 0.0 if report is None else report.exposed_ms
        found = {
            "forward_ms": 1e3 * (forward_end - start),
            "backward_ms": 1e3 * (backward_end - forward_end) - exposed_ms,
            "optimizer_ms": 1e3 * (end - backward_end),
        }
        if report is not None:
            found |= {
                "exposed_ms": exposed_ms,
                "packing_ms": report.packing_ms,
                "waiting_ms": report.waiting_ms,
                "share_hidden": report.share_hidden,
            }
        for name, value in found.items():
            parts.setdefault(name, []).append(value)
    result: dict[str, Any] = {"step_time_s": statistics.median(times[WARM_UP:]), "times": times[WARM_UP:]}
    result |= {name: round(statistics.median(values[WARM_UP:]), 4) for name, values in parts.items()}
    if compressor is not None:
        result["mode"] = compressor.mode
        result["sent_ratio"] = compressor.last_step.ratio if compressor.last_step else 1.0
        compressor.close()
    return result


def add_sync(variant: str, ddp: DistributedDataParallel) -> GradientCompressor | None:
    """Register the variant's communication hook. Returns: the compressor, if the variant is one of its modes."""
    if variant == "plain":
        return None
    if variant == "bf16_hook":
        ddp.register_comm_hook(dist.group.WORLD, bf16_hook)
        return None
    if variant == "powersgd_hook":
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=16, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, unannotated_powersgd_hook)
        return None
    sparsity = {"sparsity_target": 0.95} if variant == "sparse_int8" else {}
    chosen: dict[str, Any] = {} if variant == "default" else {"mode": variant, "protect_layers": (), **sparsity}
    compressor = GradientCompressor(timeout=TIMEOUT, **chosen)
    compressor.hook_into_model(ddp)
    return compressor


def bf16_hook(state: Any, bucket: Any) -> Any:
    """Call torch's hook by another name: DDP refuses the original without CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


def unannotated_powersgd_hook(state: Any, bucket: Any) -> Any:
    """Call torch's hook."""
    return powerSGD_hook.powerSGD_hook(state, bucket)


# DDP compares a hook's annotations with its own classes, and here they are strings.
for hook in (bf16_hook, unannotated_powersgd_hook):
    hook.__annotations__.clear()
