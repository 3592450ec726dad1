"""Diffusion objectives: noise schedule, prediction target, loss and loss weights.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc.diffusion.evaluation import SeededNoise
from lightning_aigc.errors import ModelError

LossType = Literal["l2", "huber", "smooth_l1"]
PredictionType = Literal["epsilon", "v_prediction", "sample"]

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


def example_losses(
    predicted_BCHW: Tensor,
    target_BCHW: Tensor,
    loss_type: LossType = "l2",
    huber_c: float = 0.1,
    mask_B1HW: Tensor | None = None,
) -> Tensor:
    """The loss of each example, float32 [B]; with a mask in 0..1, the weighted mean.

    `mask_B1HW` may have the picture's size; it is resized to the latents' by area.
    """
    predicted_BCHW, target_BCHW = predicted_BCHW.float(), target_BCHW.float()
    if loss_type == "l2":
        loss_BCHW = F.mse_loss(predicted_BCHW, target_BCHW, reduction="none")
    elif loss_type == "huber":
        loss_BCHW = F.huber_loss(predicted_BCHW, target_BCHW, reduction="none", delta=huber_c)
    else:
        loss_BCHW = F.smooth_l1_loss(predicted_BCHW, target_BCHW, reduction="none", beta=huber_c)
    if mask_B1HW is None:
        return loss_BCHW.mean(dim=(1, 2, 3))
    mask_B1HW = F.interpolate(mask_B1HW.float(), size=loss_BCHW.shape[-2:], mode="area")
    return (loss_BCHW * mask_B1HW).mean(dim=(1, 2, 3)) / mask_B1HW.mean(dim=(1, 2, 3)).clamp(min=1e-6)


def draw_noise(latents_BCHW: Tensor, noise_offset: float = 0.0) -> Tensor:
    """Gaussian noise of the latents' shape; `noise_offset` adds one value per channel, for darker and brighter images.

    Source: offset noise, crosslabs.org/blog/diffusion-with-offset-noise.
    """
    noise_BCHW = torch.randn_like(latents_BCHW)
    if noise_offset:
        batch, channels = latents_BCHW.shape[:2]
        offset = torch.randn(batch, channels, 1, 1, device=latents_BCHW.device, dtype=latents_BCHW.dtype)
        noise_BCHW = noise_BCHW + noise_offset * offset
    return noise_BCHW


def with_prior(loss_B: Tensor, is_prior_B: Tensor | None, weight: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of a batch with class pictures: (total, mean of user pictures, mean of class pictures or None).

    Source: prior preservation, arXiv:2208.12242, equation 2.
    """
    if is_prior_B is None or not is_prior_B.any():
        mean = loss_B.mean()
        return mean, mean, None
    user_loss, prior_loss = loss_B[~is_prior_B].mean(), loss_B[is_prior_B].mean()
    return user_loss + weight * prior_loss, user_loss, prior_loss


class DDPMObjective:
    """DDPM: uniform timesteps of a noise schedule, and the target and weights of its prediction type."""

    def __init__(self, schedule: DDPMScheduler, snr_gamma: float | None = None, *, is_debiased: bool = False) -> None:
        self.schedule = schedule
        self.num_train_timesteps = int(schedule.config.num_train_timesteps)
        self.snr_gamma, self.is_debiased = snr_gamma, is_debiased

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
        return loss_weights(self.schedule, timesteps_B, self.snr_gamma, is_debiased=self.is_debiased)
