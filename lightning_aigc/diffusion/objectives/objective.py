"""Objective: the Protocol of `DDPM` and `Flow`.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from lightning_aigc.diffusion.objectives.noise import SeededNoise


class Objective(Protocol):
    """Timesteps, noisy latents, target and loss weight of a training step."""

    schedule: Any
    """diffusers' scheduler; images are sampled with its config."""
    num_train_timesteps: int

    def draw_timesteps(self, latents_BCHW: Tensor) -> Tensor:
        """A timestep of each example [B], on the latents' device."""
        ...

    def timesteps_in_part(self, noise: SeededNoise, part: int, parts: int, latents_BCHW: Tensor) -> Tensor:
        """A timestep of each example [B] in the given one of `parts` equal parts of the schedule."""
        ...

    def add_noise(self, latents_BCHW: Tensor, noise_BCHW: Tensor, timesteps_B: Tensor) -> Tensor:
        """Noisy latents [B, C, H, W]."""
        ...

    def target(self, latents_BCHW: Tensor, noise_BCHW: Tensor, timesteps_B: Tensor) -> Tensor:
        """The denoiser's target [B, C, H, W]."""
        ...

    def weights(self, timesteps_B: Tensor) -> Tensor:
        """The loss weight of each example, float32 [B]."""
        ...
