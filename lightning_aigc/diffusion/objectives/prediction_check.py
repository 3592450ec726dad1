"""Warn of a prediction type that the untrained model does not have.

A model's output at a noisy latent is near its own target (noise, velocity or image) and far from the others, so the
loss under each type, from one forward pass, tells which one it was trained for.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import DDPMScheduler
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_aigc.diffusion.objectives.ddpm import training_target

TYPES = ("epsilon", "v_prediction", "sample")
SHARE_OF_NOISE = 0.6
"""Timestep at which to look, of the schedule's: there the three targets lie far apart."""
MUCH_LOWER = 3.0
"""Factor by which another type's loss must be lower."""
LEARNED_SHARE = 0.5
"""Share of its target's mean square that the other type's loss must be below: predicting zero, as a model of random
weights about does, is a loss of 1 of it."""


@torch.no_grad()
def loss_by_type(
    schedule: DDPMScheduler, latents_BCHW: Tensor, predict: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, tuple[float, float]]:
    """The mean loss of the model's output under each prediction type, at one timestep and with fixed noise.

    Args:
        schedule: The run's noise schedule.
        latents_BCHW: Latents of a training batch.
        predict: The model's output for noisy latents and timesteps.

    Returns: by type the loss, and the loss over the mean square of the type's target.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    noise_BCHW = torch.randn(latents_BCHW.shape, generator=generator).to(latents_BCHW)
    steps = schedule.config.num_train_timesteps
    timesteps_B = torch.full((len(latents_BCHW),), int(SHARE_OF_NOISE * steps), device=latents_BCHW.device)
    noisy_BCHW = schedule.add_noise(latents_BCHW, noise_BCHW, timesteps_B)
    predicted_BCHW = predict(noisy_BCHW, timesteps_B).float()
    losses = {}
    for kind in TYPES:
        other = DDPMScheduler.from_config(schedule.config, prediction_type=kind)
        target_BCHW = training_target(other, latents_BCHW, noise_BCHW, timesteps_B)
        loss = float((predicted_BCHW - target_BCHW).square().mean())
        losses[kind] = loss, loss / max(float(target_BCHW.square().mean()), 1e-12)
    return losses


def warn_of_prediction_type(
    schedule: DDPMScheduler, latents_BCHW: Tensor, predict: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Warn where another prediction type fits the untrained model far better than the configured one."""
    losses = loss_by_type(schedule, latents_BCHW, predict)
    configured = schedule.config.prediction_type
    best = min(losses, key=lambda kind: losses[kind][1])
    (loss, share), (least, least_share) = losses[configured], losses[best]
    if best != configured and least_share < LEARNED_SHARE and share > MUCH_LOWER * least_share:
        rank_zero_warn(
            f"prediction_type {configured} does not fit this model: its loss before training is "
            f"{loss:.2f}, and {least:.3f} as {best}; set model.init_args.prediction_type: {best}"
        )
