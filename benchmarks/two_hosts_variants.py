"""The variants of gradient sync that `two_hosts.py` compares, and how a step of each is timed."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.gradient_sync import GradientCompressor

WARM_UP = 3
TIMEOUT = timedelta(seconds=120)


def measure(variant: str, unet: nn.Module, generator: torch.Generator, steps: int) -> dict[str, Any]:
    """Train for `steps` steps after the warm-up.

    Returns: the median step time and every step's; for npu_sparse's modes, also what its report says.
    """
    bucket_mb = 1e4 if variant == "powersgd_hook" else 25  # over Gloo torch's PowerSGD aborts with two buckets
    ddp = DistributedDataParallel(unet, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    compressor = add_sync(variant, ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-5)
    times, hidden, exposed = [], [], []
    for _ in range(WARM_UP + steps):
        latents = torch.randn(1, 4, 8, 8, generator=generator)
        text = torch.randn(1, 77, 256, generator=generator)
        timestep = torch.randint(1000, (1,), generator=generator)
        dist.barrier()
        start = time.perf_counter()
        predicted: Tensor = ddp(latents, timestep, text).sample
        loss = (predicted - torch.randn(latents.shape, generator=generator)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if compressor is not None:
            compressor.finish_step()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        if compressor is not None and compressor.last_step is not None:
            hidden.append(compressor.last_step.share_hidden)
            exposed.append(compressor.last_step.exposed_ms)
    found: dict[str, Any] = {"step_time_s": statistics.median(times[WARM_UP:]), "times": times[WARM_UP:]}
    if compressor is not None:
        found["mode"] = compressor.mode
        found["sent_ratio"] = compressor.last_step.ratio if compressor.last_step else 1.0
        found["exposed_ms"] = statistics.median(exposed[WARM_UP:] or [0.0])
        found["share_hidden"] = statistics.median(hidden[WARM_UP:] or [0.0])
        compressor.close()
    return found


def add_sync(variant: str, ddp: DistributedDataParallel) -> GradientCompressor | None:
    """Register the variant's communication hook. Returns: the compressor, where the variant is one of its modes."""
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
    """Call torch's own hook, which DDP refuses by its name without CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


def unannotated_powersgd_hook(state: Any, bucket: Any) -> Any:
    """Call torch's own hook."""
    return powerSGD_hook.powerSGD_hook(state, bucket)


# DDP compares a hook's annotations with its own classes, and here they are strings.
for hook in (bf16_hook, unannotated_powersgd_hook):
    hook.__annotations__.clear()
