"""UNetTraining: DDPM training of Stable Diffusion's U-Net (1.x, 2.x and SDXL), for any choice of trained weights.

Legend: B batch, C channels, H and W latent height and width, N pictures.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch import Tensor

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.arguments import check_objective
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.evaluation import VALIDATION_TIMESTEPS, SeededNoise
from lightning_aigc.diffusion.lora_metadata import hash_base_model
from lightning_aigc.diffusion.module import DiffusionModule
from lightning_aigc.diffusion.objectives import (
    LossType,
    PredictionType,
    build_noise_schedule,
    draw_noise,
    example_losses,
    loss_weights,
    training_target,
)
from lightning_aigc.diffusion.optimization import parameter_groups
from lightning_aigc.diffusion.prediction_check import warn_of_prediction_type
from lightning_aigc.diffusion.sampling import Control, generate
from lightning_aigc.errors import ModelError
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.rng import isolate_rng
from lightning_aigc.tiny.embedded import resolve


class UNetTraining(DiffusionModule):
    """Base class for Stable Diffusion's U-Net: noise schedule, loss and sample pictures.

    Args:
        prediction_type: epsilon, v_prediction or sample; unset takes the pipeline's.
        zero_terminal_snr: Rescale the schedule so that its last step is pure noise; needs v_prediction.
        snr_gamma: Min-SNR weighting; 5 is the paper's value, unset turns it off.
        debiased_estimation: Weight by 1 / sqrt(SNR) instead of min-SNR.
        loss_type: l2, huber or smooth_l1.
        huber_c: Error at which huber and smooth_l1 change from quadratic to linear.
        noise_offset: Share of noise common to a whole channel; 0.05 to 0.1 allows darker and brighter pictures.
        kwargs: Arguments of `DiffusionModule`.
    """

    def __init__(
        self,
        prediction_type: PredictionType | None = None,
        zero_terminal_snr: bool = False,
        snr_gamma: float | None = None,
        debiased_estimation: bool = False,
        loss_type: LossType = "l2",
        huber_c: float = 0.1,
        noise_offset: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.unet: UNet2DConditionModel | None = None
        self.schedule: DDPMScheduler | None = None
        check_objective(self.args)

    def adapt(self, parts: Components) -> None:
        self.schedule = build_noise_schedule(
            parts.scheduler_config, self.args.prediction_type, zero_terminal_snr=self.args.zero_terminal_snr
        )
        self.unet = parts.unet
        if self.args.gradient_checkpointing:
            parts.unet.enable_gradient_checkpointing()

    def recompute_text_encoders(self) -> None:
        """Recompute the trained text encoders' activations in backward, under `gradient_checkpointing`."""
        for encoder in self.text_encoders if self.args.gradient_checkpointing else ():
            # transformers 5 renamed it, and recomputes in train mode only; CLIP has no dropout.
            enable = getattr(encoder, "activation_checkpointing_enable", None) or encoder.gradient_checkpointing_enable
            enable()
            encoder.train()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: the denoiser's weights, and the text encoders' at `text_encoder_lr`."""
        text = {id(p) for p in self.text_encoders.parameters()}
        groups: tuple[list[Any], list[Any]] = ([], [])
        for parameter in self.trainable_parameters():
            groups[id(parameter) in text].append(parameter)
        rate = self.args.learning_rate
        return parameter_groups(groups, (rate, self.args.get("text_encoder_lr") or rate))

    @property
    def num_train_timesteps(self) -> int:
        """Timesteps of the noise schedule."""
        self.loaded()
        assert self.schedule is not None
        return int(self.schedule.config.num_train_timesteps)

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0 and self.global_step == 0:
            forward_context = self.trainer.precision_plugin.forward_context()
            with isolate_rng(self.device), evaluating(self), forward_context:
                warn_of_prediction_type(self, batch)

    def example_losses(self, batch: dict[str, Any]) -> Tensor:
        """The weighted diffusion loss of each example, float32 [B]."""
        encoders, args = self.encoders, self.args
        assert self.schedule is not None
        latents_BCHW = encoders.latents(batch)
        noise_BCHW = draw_noise(latents_BCHW, args.noise_offset)
        timesteps_B = torch.randint(
            0, self.schedule.config.num_train_timesteps, (len(latents_BCHW),), device=latents_BCHW.device
        )
        noisy_BCHW = self.schedule.add_noise(latents_BCHW, noise_BCHW, timesteps_B)
        condition = encoders.condition(batch, with_gradients=bool(self.text_encoders))
        predicted_BCHW = self.predict(noisy_BCHW, timesteps_B, condition, batch)
        target_BCHW = training_target(self.schedule, latents_BCHW, noise_BCHW, timesteps_B)
        loss_B = example_losses(predicted_BCHW, target_BCHW, args.loss_type, args.huber_c, batch.get("mask"))
        loss_B = loss_B * loss_weights(self.schedule, timesteps_B, args.snr_gamma, is_debiased=args.debiased_estimation)
        loss_B = self.rewarded(loss_B, latents_BCHW, noisy_BCHW, predicted_BCHW, timesteps_B)
        self.last_example_losses, self.last_timesteps = loss_B.detach(), timesteps_B
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
        assert self.schedule is not None
        timesteps_B = noise.timesteps(part, parts, self.num_train_timesteps).to(latents_BCHW.device)
        noise_BCHW = noise.normal_like(latents_BCHW)
        noisy_BCHW = self.schedule.add_noise(latents_BCHW, noise_BCHW, timesteps_B)
        return noisy_BCHW, timesteps_B, training_target(self.schedule, latents_BCHW, noise_BCHW, timesteps_B)

    def predict(
        self, noisy_BCHW: Tensor, timesteps_B: Tensor, condition: dict[str, Tensor], batch: dict[str, Any]
    ) -> Tensor:
        """The U-Net's output [B, C, H, W] for these noisy latents."""
        assert self.unet is not None
        added, dtype = self.added_conditions(condition, batch), weights_dtype(self.unet)
        predicted_BCHW: Tensor = self.unet(
            noisy_BCHW.to(dtype),
            timesteps_B,
            condition["prompt_embeds"].to(dtype),
            added_cond_kwargs=added,
            **self.residuals(noisy_BCHW, timesteps_B, condition["prompt_embeds"], added, batch),
        ).sample
        return predicted_BCHW

    def added_conditions(self, condition: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Tensor] | None:
        """SDXL's pooled embeddings and sizes; None for the other families."""
        assert self.unet is not None
        if self.loaded().family != "sdxl":
            return None
        dtype = weights_dtype(self.unet)
        sizes = [batch[k].to(self.device) for k in ("original_size", "crop_top_left", "target_size")]
        return {
            "text_embeds": condition["pooled_prompt_embeds"].to(dtype),
            "time_ids": torch.cat(sizes, dim=1).to(dtype),
        }

    def residuals(
        self,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        embeddings_BTD: Tensor,
        added: dict[str, Tensor] | None,
        batch: dict[str, Any],
    ) -> dict[str, Any]:
        """Arguments of the U-Net that another network computes for this batch; none here."""
        return {}

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
        assert self.schedule is not None
        with self.averaged_weights():
            return generate(
                parts,
                self.schedule.config,
                list(prompts),
                list(seeds),
                device=self.device,
                num_inference_steps=num_inference_steps or args.num_inference_steps,
                guidance_scale=args.guidance_scale if guidance_scale is None else guidance_scale,
                batch_size=batch_size,
                time_limit=self.sampling_limit,
                control=control,
            )

    @functools.cache  # noqa: B019  hashes gigabytes, and the module lives as long as its run
    def base_model_hash(self) -> str | None:
        """sha256 of the base model's file or U-Net weights; None for a hub id."""
        path = resolve(self.args.pretrained_model_name_or_path)
        return hash_base_model(path) if path.exists() else None
