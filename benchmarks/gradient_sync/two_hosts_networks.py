"""The networks that `two_hosts.py` trains, with random weights that are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """A network, and its loss on a random batch."""

    module: nn.Module
    loss: Callable[[nn.Module, torch.Generator], Tensor]
    """Called with the module that DDP wraps."""


def make_network(name: str) -> Task:
    """The U-Net of 58 M parameters, or 50 M in linear layers."""
    torch.manual_seed(0)
    return _unet() if name == "unet" else _linear()


def _unet() -> Task:
    from diffusers import UNet2DConditionModel

    module = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(96, 192, 320, 320),
        layers_per_block=2,
        cross_attention_dim=256,
        attention_head_dim=8,
        norm_num_groups=32,
    )

    def loss(ddp: Any, generator: torch.Generator) -> Tensor:
        latents = torch.randn(1, 4, 8, 8, generator=generator)
        text = torch.randn(1, 77, 256, generator=generator)
        timestep = torch.randint(1000, (1,), generator=generator)
        predicted: Tensor = ddp(latents, timestep, text).sample
        return (predicted - torch.randn(latents.shape, generator=generator)).square().mean()

    return Task(module, loss)


def _linear() -> Task:
    module = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(2048, 2048), nn.SiLU())))

    def loss(ddp: Any, generator: torch.Generator) -> Tensor:
        given = torch.randn(8, 2048, generator=generator)
        predicted: Tensor = ddp(given)
        return (predicted - torch.randn(given.shape, generator=generator)).square().mean()

    return Task(module, loss)
