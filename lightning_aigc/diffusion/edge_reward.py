"""A reward for edges: compare those of the one-step prediction with those of the training picture, in pixels.

Source: Li et al., ControlNet++, arXiv:2404.07987, equations 8 and 9: the picture is predicted in one step and only at
low timesteps, where that is sharp. Here only a crop of the latent is decoded, and the reference is the training
picture's own way through the autoencoder.

Legend: B batch, K examples at low timesteps, C latent channels, H and W latent height and width.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_aigc.metrics import edge_magnitude

CROP = 64
"""Side of the decoded crop, in latent pixels."""


def predict_latents(schedule: DDPMScheduler, noisy_BCHW: Tensor, predicted_BCHW: Tensor, timesteps_B: Tensor) -> Tensor:
    """The clean latents [B, C, H, W] that the model's output stands for, in one step."""
    alpha = schedule.alphas_cumprod.to(noisy_BCHW.device)[timesteps_B].view(-1, 1, 1, 1).float()
    noisy, predicted, kind = noisy_BCHW.float(), predicted_BCHW.float(), schedule.config.prediction_type
    if kind == "sample":
        return predicted
    if kind == "v_prediction":
        clean_BCHW: Tensor = alpha.sqrt() * noisy - (1 - alpha).sqrt() * predicted
    else:
        clean_BCHW = (noisy - (1 - alpha).sqrt() * predicted) / alpha.sqrt()
    return clean_BCHW


def edge_losses(vae: Any, clean_BCHW: Tensor, predicted_BCHW: Tensor, timesteps_B: Tensor, max_timestep: int) -> Tensor:
    """Mean squared difference of the edges' magnitudes, float32 [B]; 0 where the timestep is above `max_timestep`.

    The gradient goes through the decoder, which is frozen; its activations are computed again in backward.
    """
    low_B = timesteps_B <= max_timestep
    losses_B = predicted_BCHW.new_zeros(len(timesteps_B), dtype=torch.float32)
    if not low_B.any():
        return losses_B
    rows, columns = (_window(side) for side in clean_BCHW.shape[-2:])
    clean_KCHW, predicted_KCHW = (each[low_B][..., rows, columns] for each in (clean_BCHW, predicted_BCHW))

    def decode(latents_KCHW: Tensor) -> Tensor:
        scaled = (latents_KCHW / float(vae.config.scaling_factor)).to(vae.dtype)
        return edge_magnitude(vae.decode(scaled).sample.float() / 2 + 0.5)

    # Without autocast: the autoencoder gives NaN in half precision.
    with torch.autocast(predicted_BCHW.device.type, enabled=False):
        with torch.no_grad():
            wanted = decode(clean_KCHW)
        drawn: Any = checkpoint(decode, predicted_KCHW, use_reentrant=False)
    return losses_B.masked_scatter(low_B, (drawn - wanted).square().mean(dim=(1, 2, 3)))


def _window(side: int) -> slice:
    """A random window of CROP of these pixels; all where there are no more."""
    if side <= CROP:
        return slice(0, side)
    start = int(torch.randint(0, side - CROP + 1, ()))
    return slice(start, start + CROP)
