"""Flow: flow matching, where a model predicts the velocity from the image to the noise.

A noisy latent is (1 - sigma) x latent + sigma x noise, its timestep 1000 sigma. `compute_density_for_timestep_sampling`
and `compute_loss_weighting_for_sd3` of diffusers draw and weight; sigmas come from a table on the latents' device, so
that no step waits for one.
Source: Esser et al., Scaling Rectified Flow Transformers, arXiv:2403.03206, section 3.1.

Legend: B batch, C channels, H and W latent height and width, S steps of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_aigc.diffusion.objectives.noise import SeededNoise
from lightning_aigc.diffusion.objectives.settings import ObjectiveSettings

if TYPE_CHECKING:
    from diffusers import FlowMatchEulerDiscreteScheduler

QUARTERS = 4
DRAWS = 100_000


class Flow:
    """Flow matching: timesteps, mixing of latents and noise, and the target and weight of each example.

    Args:
        scheduler_config: Config of the pipeline's FlowMatchEulerDiscreteScheduler.
        settings: Of these, the options of flow matching.
        patch_size: Latent pixels per side of a token; schedulers with a dynamic shift count tokens.
        mu: The exponent of that shift from the scheduler's config and the number of tokens; unset is linear.
    """

    def __init__(
        self,
        scheduler_config: Mapping[str, Any],
        settings: ObjectiveSettings,
        *,
        patch_size: int = 2,
        mu: Callable[[Mapping[str, Any], int], float] | None = None,
    ) -> None:
        self.schedule = build_flow_schedule(scheduler_config, settings.flow_shift)
        self.num_train_timesteps = int(self.schedule.config.num_train_timesteps)
        self.settings = settings
        self.patch_size, self._mu = patch_size, mu or linear_mu
        self._sigmas: dict[tuple[int, torch.device], Tensor] = {}

    # Timesteps -------------------------------------------------------------------------------------------------------

    def draw_timesteps(self, latents_BCHW: Tensor) -> Tensor:
        """A timestep of each example, float32 [B] in 0..1000, on the latents' device."""
        device = latents_BCHW.device
        settings = self.settings
        scheme = "none" if settings.timestep_sampling == "uniform" else settings.timestep_sampling
        from diffusers.training_utils import compute_density_for_timestep_sampling

        drawn_B = compute_density_for_timestep_sampling(
            scheme, len(latents_BCHW), settings.logit_mean, settings.logit_std, settings.mode_scale, device=device
        )
        return self._timesteps_at(drawn_B * self.num_train_timesteps, latents_BCHW)

    def timesteps_in_part(self, noise: SeededNoise, part: int, parts: int, latents_BCHW: Tensor) -> Tensor:
        """A timestep of each example, float32 [B], in the given one of `parts` equal parts of the schedule."""
        count = self.num_train_timesteps
        return self._timesteps_at(noise.timesteps(parts - 1 - part, parts, count).to(latents_BCHW.device), latents_BCHW)

    def _timesteps_at(self, places_B: Tensor, latents_BCHW: Tensor) -> Tensor:
        table_S = self._sigma_table(latents_BCHW)
        return table_S[places_B.long().clamp(0, len(table_S) - 1)] * self.num_train_timesteps

    def _sigma_table(self, latents_BCHW: Tensor) -> Tensor:
        """The shifted sigmas [S], from noise to image, for latents of this size."""
        config = self.schedule.config
        height, width = latents_BCHW.shape[-2:]
        tokens = (height // self.patch_size) * (width // self.patch_size) if config.use_dynamic_shifting else 0
        key = tokens, latents_BCHW.device
        if key not in self._sigmas:
            sigmas_S = self.schedule.sigmas[: self.num_train_timesteps].float()
            if tokens:
                sigmas_S = self.schedule.time_shift(self._mu(config, tokens), 1.0, sigmas_S)
            self._sigmas[key] = sigmas_S.to(latents_BCHW.device)
        return self._sigmas[key]

    def density(self, latents_BCHW: Tensor) -> str:
        """The shares of training steps in each quarter of 0..1000, as one line for people."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            drawn = self.draw_timesteps(latents_BCHW[:1].cpu().expand(DRAWS, -1, -1, -1))
        shares = torch.histc(drawn, QUARTERS, 0, self.num_train_timesteps) / DRAWS
        width = self.num_train_timesteps // QUARTERS
        parts = (f"{100 * share:.0f} % in {i * width}..{(i + 1) * width}" for i, share in enumerate(shares.tolist()))
        return f"timesteps: {self.settings.timestep_sampling}, {', '.join(parts)} (1000 is pure noise)"

    # Loss ------------------------------------------------------------------------------------------------------------

    def add_noise(self, latents_BCHW: Tensor, noise_BCHW: Tensor, timesteps_B: Tensor) -> Tensor:
        sigmas_B111 = self._sigmas_of(timesteps_B)
        return (1.0 - sigmas_B111) * latents_BCHW + sigmas_B111 * noise_BCHW

    def target(self, latents_BCHW: Tensor, noise_BCHW: Tensor, timesteps_B: Tensor) -> Tensor:
        """The velocity, from the image to the noise."""
        return noise_BCHW - latents_BCHW

    def weights(self, timesteps_B: Tensor) -> Tensor:
        """The loss weight of each example, float32 [B]."""
        sigmas_B = self._sigmas_of(timesteps_B).flatten()
        if self.settings.loss_weighting == "sigma_squared":
            return sigmas_B.square()
        from diffusers.training_utils import compute_loss_weighting_for_sd3

        weights_B: Tensor = compute_loss_weighting_for_sd3(self.settings.loss_weighting, sigmas_B)
        return weights_B

    def _sigmas_of(self, timesteps_B: Tensor) -> Tensor:
        return (timesteps_B / self.num_train_timesteps)[:, None, None, None]


def build_flow_schedule(
    config: Mapping[str, Any], flow_shift: float | Literal["auto"]
) -> FlowMatchEulerDiscreteScheduler:
    """The schedule of a pipeline's scheduler config with this shift; `auto` is the config's own."""
    own: dict[str, Any] = {} if flow_shift == "auto" else {"shift": flow_shift, "use_dynamic_shifting": False}
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler.from_config(config, **own)


def linear_mu(config: Mapping[str, Any], tokens: int) -> float:
    """The exponent of a dynamic shift, on the line through the scheduler's two sequence lengths."""
    slope = (config["max_shift"] - config["base_shift"]) / (config["max_image_seq_len"] - config["base_image_seq_len"])
    return float(config["base_shift"] + slope * (tokens - config["base_image_seq_len"]))
