"""Noise of a training step, and seeded noise of validation.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor


class SeededNoise:
    """Noise and timesteps of a batch's examples, each from a generator with its own seed, drawn on the CPU."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def normal_like(self, tensor_B: Tensor) -> Tensor:
        """Gaussian noise with the tensor's shape, dtype and device."""
        rows = [torch.randn(tensor_B.shape[1:], generator=generator) for generator in self.generators]
        return torch.stack(rows).to(tensor_B.device, tensor_B.dtype)

    def timesteps(self, part: int, parts: int, count: int) -> Tensor:
        """A timestep of each example, int64 [B], in the given one of `parts` equal parts of `count` timesteps."""
        drawn_B = torch.stack([torch.rand((), generator=generator) for generator in self.generators])
        return ((part + drawn_B) * count / parts).long().clamp(max=count - 1)


def example_seeds(batch: dict[str, Any]) -> list[int]:
    """A seed for each example: the loader's `seeds`, or a hash of the example's values."""
    if "seeds" in batch:
        return [int(seed) for seed in batch["seeds"].tolist()]
    values_B = (batch["latent_moments"] if "latent_moments" in batch else batch["pixel_values"]).float().cpu()
    return [int(sha256(value.numpy().tobytes()).hexdigest()[:15], 16) for value in values_B.contiguous()]


def draw_noise(latents_BCHW: Tensor, noise_offset: float = 0.0) -> Tensor:
    """Gaussian noise with the latents' shape; `noise_offset` adds a value per channel, for darker and brighter images.

    Source: offset noise, crosslabs.org/blog/diffusion-with-offset-noise.
    """
    noise_BCHW = torch.randn_like(latents_BCHW)
    if noise_offset:
        batch, channels = latents_BCHW.shape[:2]
        offset = torch.randn(batch, channels, 1, 1, device=latents_BCHW.device, dtype=latents_BCHW.dtype)
        noise_BCHW = noise_BCHW + noise_offset * offset
    return noise_BCHW
