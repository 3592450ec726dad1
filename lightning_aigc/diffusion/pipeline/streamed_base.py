"""`base_location`: which part of a frozen denoiser waits in host memory, and the checks before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import psutil
import torch
from torch import nn

from lightning_aigc._lightning import LightningModule, Trainer, rank_zero_info
from lightning_aigc.diffusion.families import Components
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision.memory.streamed_blocks import StreamedBlocks, blocks_of, fitting_share, has_skips
from lightning_aigc.quantization.frozen import IGNORED_BY_DDP, stored_bytes

BaseLocation = Literal["fit"] | dict[str, float]
KEY = "model.init_args.base_location"
HOST_DEVICES = ("cpu",)
"""Devices that compute in host memory."""
GIB = 2**30
HOST_RESERVE_GIB = 4
STEP_GIB = 4.5
"""Memory of a step without the base, and 1 GiB that stays free, for `fit`: FLUX.1 at rank 32 and `memory: max` needs
3.5 GiB by counting."""


def check_base_location(location: object) -> None:
    """Check the value before weights are read. Raises: ConfigError."""
    if location is None:
        return
    is_share = isinstance(location, Mapping) and set(location) == {"device"}
    share: Any = location["device"] if isinstance(location, Mapping) and is_share else 0.0
    is_number = isinstance(share, (int, float)) and not isinstance(share, bool) and math.isfinite(share)
    if location != "fit" and not (is_share and is_number and 0 <= share < 1):
        raise ConfigError(
            f"{KEY} must be null, fit, or {{device: 0.6}}, a share of the blocks in 0..1 and below 1; got {location!r}"
        )


def check_run(trainer: Trainer, location: BaseLocation, *, gradient_checkpointing: bool, dropout: bool) -> None:
    """Check that a run's strategy, device and precision go with streamed blocks. Raises: ConfigError."""
    precision: Any = trainer.precision_plugin
    strategy = type(trainer.strategy).__name__
    if strategy in ("ZeRO23Strategy", "FSDPStrategy", "ModelParallelStrategy") or "DeepSpeed" in strategy:
        reason = f"{getattr(trainer.strategy, 'label', strategy)} cuts weights over the ranks itself; use strategy ddp"
    elif location != "fit" and trainer.strategy.root_device.type in HOST_DEVICES:
        reason = "this run computes on the CPU, where host memory is all there is; leave it unset"
    elif gradient_checkpointing:
        reason = "streamed blocks run again in backward in any case; set model.init_args.gradient_checkpointing: false"
    elif dropout:
        reason = "streamed blocks run twice, with other random numbers; set model.init_args.lora_dropout: 0"
    elif not isinstance(getattr(precision, "memory", "off"), str):
        reason = "a memory budget plans what blocks save, and streamed blocks save their inputs; set memory: lean"
    elif getattr(precision, "graph", False) is True:
        reason = "a recorded graph reads weights at fixed addresses; set graph: auto or false"
    else:
        return
    raise ConfigError(f"{KEY}: {reason}")


def stream_base(
    module: LightningModule, components: Components, location: BaseLocation, trainer: Trainer
) -> StreamedBlocks | None:
    """Stream the denoiser's frozen blocks to the device; None where all of them fit.

    Raises: ConfigError where host memory is too small.
    """
    device = trainer.strategy.root_device
    blocks = blocks_of(components.denoiser)
    if location == "fit":
        # Ranks stream the same blocks: DDP broadcasts the others.
        own = torch.tensor(_share_that_fits(components.denoiser, blocks, device), device=device)
        share = float(trainer.strategy.reduce(own, reduce_op="min"))
    else:
        share = float(location["device"])
    if round(share * len(blocks)) == len(blocks):
        rank_zero_info("base_location: all blocks fit on the device, none is streamed")
        return None
    wanted = (1 - share) * sum(stored_bytes(p) for block in blocks for p in block.parameters() if not p.requires_grad)
    wanted *= trainer.num_devices  # each rank of a host has its own copy
    available = psutil.virtual_memory().available
    if wanted > available - HOST_RESERVE_GIB * GIB:
        raise ConfigError(
            f"{KEY}: {wanted / GIB:.1f} GiB would wait in host memory, which has {available / GIB:.1f} GiB left, and"
            f" {HOST_RESERVE_GIB} of them stay free; keep more on the device, or set"
            " model.init_args.base_quantization: nf4"
        )
    streamed = StreamedBlocks(blocks, share, device, has_skips=has_skips(components.denoiser))
    held = {id(weight) for host in streamed.hosts for weight in host.waiting}
    ignored = [name for name, p in module.named_parameters() if id(p) in held]
    known = vars(module).get(IGNORED_BY_DDP, ())
    setattr(module, IGNORED_BY_DDP, list(dict.fromkeys([*known, *ignored])))
    rank_zero_info(f"base_location: {streamed.summary()}")
    return streamed


def _share_that_fits(network: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> float:
    if device.type in HOST_DEVICES:
        return 1.0
    free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
    inside = {id(p) for block in blocks for p in block.parameters() if not p.requires_grad}
    others = sum(stored_bytes(p) for p in network.parameters() if id(p) not in inside)
    return fitting_share(blocks, free_bytes, others + STEP_GIB * GIB)
