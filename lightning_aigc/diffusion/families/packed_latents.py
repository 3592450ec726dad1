"""Latents in tokens of 2 x 2 pixels: methods of the families whose pipelines pack them so.

A family assigns them to its own methods.

Legend: B batch, C channels, H and W latent height and width, N image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_aigc.diffusion.families.tokens import pack, unpack, unpack_first
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily


def tokens(self: Any, latents_BCHW: Tensor) -> Tensor:
    """Tokens [B, N, 4C] of 2 x 2 latent pixels."""
    return pack(latents_BCHW)


def latents_of(self: Any, answer: Tensor, height: int, width: int) -> Tensor:
    """Latents [B, C, H, W] from the first of the transformer's tokens; those of sources follow."""
    return unpack_first(answer, height, width)


def unscale(self: Any, vae: Any, sampled: Tensor, height: int, width: int) -> Tensor:
    """Unscaled latents [B, C, H, W] from the pipeline's tokens."""
    return TransformerFamily.unscale(self, vae, unpack(sampled, height, width), height, width)


def channels_read(self: Any, vae_config: Mapping[str, Any]) -> int | None:
    """Channels of a token; None where the config does not tell."""
    channels = vae_config.get("latent_channels")
    return None if channels is None else 4 * int(channels)


def patch_size(self: Any, denoiser: Any) -> int:
    """Scaled latent pixels per side of a token."""
    return 2
