"""Qwen-Image's autoencoder, whose latents are frames of a video: methods of the families that have it.

A family assigns them to its own methods: Qwen-Image, Qwen-Image-Edit and Krea 2.

Legend: B batch, C channels, H and W latent height and width, N image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.diffusion.families.tokens import unpack


def pixels_per_latent(self: Any, vae: Any) -> int:
    """Pixels per side of a latent's pixel."""
    return int(2 ** len(vae.config.temperal_downsample))


def encode(self: Any, vae: Any, pixels_B3HW: Tensor) -> Tensor:
    """Mean and log-variance of unscaled latents, [B, 2C, H, W]: an image is a video of one frame."""
    moments: Tensor = vae.encode(pixels_B3HW.unsqueeze(2)).latent_dist.parameters
    return moments.squeeze(2)


def decode(self: Any, vae: Any, latents_BCHW: Tensor) -> Tensor:
    """Pixels [B, 3, H, W] in -1..1."""
    pixels: Tensor = vae.decode(latents_BCHW.unsqueeze(2)).sample
    return pixels[:, :, 0]


def scale(self: Any, vae: Any, latents_BCHW: Tensor) -> Tensor:
    """Scaled latents from unscaled ones."""
    mean, inverse_std = _statistics(vae, latents_BCHW)
    return (latents_BCHW - mean) * inverse_std


def unscale(self: Any, vae: Any, sampled: Tensor, height: int, width: int) -> Tensor:
    """Unscaled latents [B, C, H, W] from the pipeline's tokens."""
    mean, inverse_std = _statistics(vae, sampled)
    return unpack(sampled, height, width) / inverse_std + mean


def channels_read(self: Any, vae_config: Mapping[str, Any]) -> int | None:
    """Channels of a token; None where the config does not tell."""
    channels = vae_config.get("z_dim")
    return None if channels is None else 4 * int(channels)


def _statistics(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
    return mean.to(like.device, like.dtype), (1.0 / std).to(like.device, like.dtype)
