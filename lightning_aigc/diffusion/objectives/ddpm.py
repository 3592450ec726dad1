"""DDPM: noise schedule, prediction target and loss weights.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_aigc._lightning import rank_zero_warn
from lightning_aigc.diffusion.objectives.noise import SeededNoise
from lightning_aigc.diffusion.objectives.settings import ObjectiveSettings, PredictionType
from lightning_aigc.errors import ModelError

if TYPE_CHECKING:
    from diffusers import DDPMScheduler

# Debiased weights are unbounded as the noise vanishes; sd-scripts clips at the same ratio.
MAX_DEBIASED_SNR = 1000.0


def build_noise_schedule(
    config: Mapping[str, Any], prediction_type: PredictionType | None, *, zero_terminal_snr: bool
) -> DDPMScheduler:
    """The DDPM schedule of a pipeline's scheduler config, with the given prediction type and terminal SNR.

    Raises: ModelError for a zero terminal SNR with epsilon prediction.
    """
    overrides: dict[str, Any] = {} if prediction_type is None else {"prediction_type": prediction_type}
    if zero_terminal_snr:
        overrides |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    from diffusers import DDPMScheduler

    schedule = DDPMScheduler.from_config(config, **overrides)
    if zero_terminal_snr and schedule.config.prediction_type == "epsilon":
        raise ModelError(
            "model.init_args.zero_terminal_snr leaves no signal at the last step, where epsilon carries no information;"
            " set model.init_args.prediction_type: v_prediction"
        )
    return schedule


def training_target(schedule: DDPMScheduler, latents_BCHW: Tensor, noise_BCHW: Tensor, timesteps_B: Tensor) -> Tensor:
    """The target of the model's output for these noisy latents, by the schedule's `prediction_type`.

    Raises: ValueError for a prediction type that is not epsilon, v_prediction or sample.
    """
    kind = schedule.config.prediction_type
    if kind == "epsilon":
        return noise_BCHW
    if kind == "v_prediction":
        velocity_BCHW: Tensor = schedule.get_velocity(latents_BCHW, noise_BCHW, timesteps_B)
        return velocity_BCHW
    if kind == "sample":
        return latents_BCHW
    raise ValueError(f"prediction_type must be epsilon, v_prediction or sample, got {kind!r}")


def loss_weights(
    schedule: DDPMScheduler, timesteps_B: Tensor, snr_gamma: float | None = None, *, is_debiased: bool = False
) -> Tensor:
    """The loss weight of each example, float32 [B]: min-SNR-gamma, debiased estimation, or ones.

    Source: min-SNR, arXiv:2303.09556, equation 8; debiased estimation, arXiv:2310.08442, equation 10.
    """
    if snr_gamma is None and not is_debiased:
        return torch.ones_like(timesteps_B, dtype=torch.float32)
    from diffusers.training_utils import compute_snr

    snr_B: Tensor = compute_snr(schedule, timesteps_B).float()
    kind = schedule.config.prediction_type
    if is_debiased:
        snr_B = snr_B.clamp(max=MAX_DEBIASED_SNR)
        # The floor is for zero terminal SNR, where the last step has no signal.
        return 1 / (snr_B + 1) if kind == "v_prediction" else snr_B.clamp(min=1e-3).rsqrt()
    assert snr_gamma is not None
    capped_B = snr_B.clamp(max=snr_gamma)
    if kind == "v_prediction":
        return capped_B / (snr_B + 1)
    if kind == "sample":
        return capped_B
    return torch.where(snr_B > 0, capped_B / snr_B.clamp(min=1e-12), torch.ones_like(snr_B))


class DDPM:
    """Denoising diffusion: uniform timesteps of a noise schedule, with the target and weights of its prediction type.

    Args:
        scheduler_config: Config of the pipeline's scheduler.
        settings: Of these, `prediction_type`, `zero_terminal_snr`, `snr_gamma` and `debiased_estimation`.

    Raises: ModelError for a zero terminal SNR with epsilon prediction.
    """

    def __init__(self, scheduler_config: Mapping[str, Any], settings: ObjectiveSettings) -> None:
        self.schedule = build_noise_schedule(
            scheduler_config, settings.prediction_type, zero_terminal_snr=settings.zero_terminal_snr
        )
        self.num_train_timesteps = int(self.schedule.config.num_train_timesteps)
        self.settings = settings

    def draw_timesteps(self, latents_BCHW: Tensor) -> Tensor:
        """A timestep of each example, int64 [B]."""
        return torch.randint(0, self.num_train_timesteps, (len(latents_BCHW),), device=latents_BCHW.device)

    def timesteps_in_part(self, noise: SeededNoise, part: int, parts: int, latents_BCHW: Tensor) -> Tensor:
        """A timestep of each example, int64 [B], in the given one of `parts` equal parts of the schedule."""
        return noise.timesteps(part, parts, self.num_train_timesteps).to(latents_BCHW.device)

    def add_noise(self, latents_BCHW: Tensor, noise_BCHW: Tensor, timesteps_B: Tensor) -> Tensor:
        noisy_BCHW: Tensor = self.schedule.add_noise(latents_BCHW, noise_BCHW, timesteps_B)
        return noisy_BCHW

    def target(self, latents_BCHW: Tensor, noise_BCHW: Tensor, timesteps_B: Tensor) -> Tensor:
        return training_target(self.schedule, latents_BCHW, noise_BCHW, timesteps_B)

    def weights(self, timesteps_B: Tensor) -> Tensor:
        """The loss weight of each example, float32 [B]."""
        gamma, is_debiased = self.settings.snr_gamma, self.settings.debiased_estimation
        return loss_weights(self.schedule, timesteps_B, gamma, is_debiased=is_debiased)


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
        from diffusers import DDPMScheduler

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
