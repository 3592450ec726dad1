"""DenoiserTraining: one step of any denoiser, its held-out loss and its pictures; an objective says what it learns.

Legend: B batch, C channels, H and W latent height and width, N pictures.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_aigc.diffusion.evaluation import VALIDATION_TIMESTEPS, SeededNoise
from lightning_aigc.diffusion.lora_metadata import hash_base_model
from lightning_aigc.diffusion.module import DiffusionModule
from lightning_aigc.diffusion.objectives import LossType, draw_noise, example_losses
from lightning_aigc.diffusion.sampling import Control, generate
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError


class Objective(Protocol):
    """What a denoiser learns: `DDPMObjective` or `FlowObjective`."""

    schedule: Any
    """diffusers' scheduler, with the config that pictures are sampled with."""
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
        """What the denoiser should answer, [B, C, H, W]."""
        ...

    def weights(self, timesteps_B: Tensor) -> Tensor:
        """The loss weight of each example, float32 [B]."""
        ...


class DenoiserTraining(DiffusionModule):
    """Base class of U-Nets and transformers: loss and sample pictures.

    Args:
        loss_type: l2, huber or smooth_l1.
        huber_c: Error at which huber and smooth_l1 change from quadratic to linear.
        noise_offset: Share of noise common to a whole channel; 0.05 to 0.1 allows darker and brighter pictures.
        kwargs: Arguments of `DiffusionModule`.
    """

    def __init__(
        self, loss_type: LossType = "l2", huber_c: float = 0.1, noise_offset: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.objective: Objective | None = None

    @property
    def num_train_timesteps(self) -> int:
        """Timesteps of the noise schedule."""
        return self._loaded_objective().num_train_timesteps

    def _loaded_objective(self) -> Objective:
        self.loaded()
        assert self.objective is not None
        return self.objective

    def sampling_config(self) -> Mapping[str, Any]:
        """The config of the scheduler that pictures are sampled with."""
        config: Mapping[str, Any] = self._loaded_objective().schedule.config
        return config

    def example_losses(self, batch: dict[str, Any]) -> Tensor:
        """The weighted diffusion loss of each example, float32 [B]."""
        encoders, args, objective = self.encoders, self.args, self._loaded_objective()
        latents_BCHW = encoders.latents(batch)
        noise_BCHW = draw_noise(latents_BCHW, args.noise_offset)
        timesteps_B = objective.draw_timesteps(latents_BCHW)
        noisy_BCHW = objective.add_noise(latents_BCHW, noise_BCHW, timesteps_B)
        condition = encoders.condition(batch, with_gradients=bool(self.text_encoders))
        predicted_BCHW = self.predict(noisy_BCHW, timesteps_B, condition, batch)
        target_BCHW = objective.target(latents_BCHW, noise_BCHW, timesteps_B)
        loss_B = example_losses(predicted_BCHW, target_BCHW, args.loss_type, args.huber_c, batch.get("mask"))
        loss_B = loss_B * objective.weights(timesteps_B)
        loss_B = self.rewarded(loss_B, latents_BCHW, noisy_BCHW, predicted_BCHW, timesteps_B)
        self.last_example_losses, self.last_timesteps = loss_B.detach(), timesteps_B.long()
        return loss_B

    def rewarded(
        self, loss_B: Tensor, latents_BCHW: Tensor, noisy_BCHW: Tensor, predicted_BCHW: Tensor, timesteps_B: Tensor
    ) -> Tensor:
        """The losses with what else a family wants of its prediction; nothing here."""
        return loss_B

    def validation_losses(self, batch: dict[str, Any], noise: SeededNoise) -> Tensor:
        """The mean squared error of the prediction, float32 [B], over one timestep in each part of the schedule.

        It is neither weighted by SNR nor Huber, and its noise has no offset, so that runs which differ in these can be
        compared; where the batch has masks, only their part counts.
        """
        encoders = self.encoders
        latents_BCHW = encoders.latents(batch, noise.normal_like)
        condition = encoders.condition(batch, with_gradients=False)
        losses = []
        for part in range(VALIDATION_TIMESTEPS):
            noisy_BCHW, timesteps_B, target_BCHW = self.noised(latents_BCHW, noise, part, VALIDATION_TIMESTEPS)
            predicted_BCHW = self.predict(noisy_BCHW, timesteps_B, condition, batch)
            losses.append(example_losses(predicted_BCHW, target_BCHW, mask_B1HW=batch.get("mask")))
        return torch.stack(losses).mean(0)

    def noised(self, latents_BCHW: Tensor, noise: SeededNoise, part: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy latents [B, C, H, W], their timesteps [B] in this part of the schedule, and the model's target.

        Draws the timesteps first, then the noise.
        """
        objective = self._loaded_objective()
        timesteps_B = objective.timesteps_in_part(noise, part, parts, latents_BCHW)
        noise_BCHW = noise.normal_like(latents_BCHW)
        noisy_BCHW = objective.add_noise(latents_BCHW, noise_BCHW, timesteps_B)
        return noisy_BCHW, timesteps_B, objective.target(latents_BCHW, noise_BCHW, timesteps_B)

    def predict(
        self, noisy_BCHW: Tensor, timesteps_B: Tensor, condition: dict[str, Tensor], batch: dict[str, Any]
    ) -> Tensor:
        """The denoiser's output [B, C, H, W] for these noisy latents."""
        raise NotImplementedError

    def sample(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        batch_size: int | None = None,
        control: Control | None = None,
    ) -> Tensor:
        """Generate one picture per prompt, float32 [N, 3, H, W] in 0..1 on the CPU; equal seeds give equal pictures.

        `batch_size` pictures are generated at once; unset means the pixels of four pictures of 512 px. `control`
        is a ControlNet with a condition for each picture.

        Raises: ModelError if the numbers of seeds and prompts differ; SamplingTooSlow past `sample_time_limit_s`.
        """
        if len(prompts) != len(seeds):
            raise ModelError(f"sample needs one seed per prompt, got {len(prompts)} prompts and {len(seeds)} seeds")
        parts, args = self.loaded(), self.args
        with self.averaged_weights():
            return generate(
                parts,
                self.sampling_config(),
                list(prompts),
                list(seeds),
                device=self.device,
                num_inference_steps=num_inference_steps or args.num_inference_steps,
                guidance_scale=args.guidance_scale if guidance_scale is None else guidance_scale,
                batch_size=batch_size,
                time_limit=self.sampling_limit,
                control=control,
                resolution=args.get("sample_resolution"),
            )

    @functools.cache  # noqa: B019  hashes gigabytes, and the module lives as long as its run
    def base_model_hash(self) -> str | None:
        """sha256 of the base model's file or U-Net weights; None for a hub id."""
        path = resolve(self.args.pretrained_model_name_or_path)
        return hash_base_model(path) if path.exists() else None
