"""UNetTraining: DDPM training of Stable Diffusion's U-Net (1.x, 2.x and SDXL), for any choice of trained weights.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch import Tensor

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.arguments import check_objective
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.denoiser_training import DenoiserTraining
from lightning_aigc.diffusion.half_precision import computed_in_half
from lightning_aigc.diffusion.objectives import DDPMObjective, PredictionType, build_noise_schedule
from lightning_aigc.diffusion.optimization import parameter_groups
from lightning_aigc.diffusion.prediction_check import warn_of_prediction_type
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.rng import isolate_rng


class UNetTraining(DenoiserTraining):
    """Base class for Stable Diffusion's U-Net: noise schedule and prediction.

    Args:
        prediction_type: epsilon, v_prediction or sample; unset takes the pipeline's.
        zero_terminal_snr: Rescale the schedule so that its last step is pure noise; needs v_prediction.
        snr_gamma: Min-SNR weighting; 5 is the paper's value, unset turns it off.
        debiased_estimation: Weight by 1 / sqrt(SNR) instead of min-SNR.
        kwargs: Arguments of `DenoiserTraining` and `DiffusionModule`.
    """

    def __init__(
        self,
        prediction_type: PredictionType | None = None,
        zero_terminal_snr: bool = False,
        snr_gamma: float | None = None,
        debiased_estimation: bool = False,
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
        self.objective = DDPMObjective(self.schedule, self.args.snr_gamma, is_debiased=self.args.debiased_estimation)
        self.unet = parts.denoiser
        if self.args.gradient_checkpointing:
            parts.denoiser.enable_gradient_checkpointing()

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

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0 and self.global_step == 0:
            forward_context = self.trainer.precision_plugin.forward_context()
            with isolate_rng(self.device), evaluating(self), forward_context, computed_in_half(self):
                warn_of_prediction_type(self, batch)

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
