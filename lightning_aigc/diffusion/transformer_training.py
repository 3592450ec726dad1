"""TransformerTraining: flow matching of diffusion transformers, for any choice of trained weights.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.denoiser_training import DenoiserTraining
from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.diffusion.flow_objective import FlowLossWeighting, FlowObjective, TimestepSampling, check_flow


class TransformerTraining(DenoiserTraining):
    """Base class for diffusion transformers: timesteps, velocity and prediction.

    Args:
        timestep_sampling: Where training looks: uniform, logit_normal (most in the middle) or mode (most at the ends).
        flow_shift: Moves timesteps towards the noise, as sampling does: `auto` is the pipeline's own, 1 is none.
        loss_weighting: none; sigma_sqrt, sigma_squared (diffusers' preconditioned outputs) or cosmap.
        logit_mean: Mean of logit_normal; below 0 looks more at noise.
        logit_std: Its standard deviation.
        mode_scale: How far mode leans to the ends.
        kwargs: Arguments of `DenoiserTraining` and `DiffusionModule`.
    """

    families: ClassVar[tuple[str, ...]] = tuple(FAMILIES)

    def __init__(
        self,
        timestep_sampling: TimestepSampling = "logit_normal",
        flow_shift: float | Literal["auto"] = "auto",
        loss_weighting: FlowLossWeighting = "none",
        logit_mean: float = 0.0,
        logit_std: float = 1.0,
        mode_scale: float = 1.29,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.transformer: nn.Module | None = None
        check_flow(self.args)

    def adapt(self, parts: Components) -> None:
        args = self.args
        self.objective = FlowObjective(
            parts.scheduler_config,
            timestep_sampling=args.timestep_sampling,
            flow_shift=args.flow_shift,
            loss_weighting=args.loss_weighting,
            logit_mean=args.logit_mean,
            logit_std=args.logit_std,
            mode_scale=args.mode_scale,
            patch_size=int(parts.denoiser.config.patch_size),
        )
        self.transformer = parts.denoiser
        if args.gradient_checkpointing:
            parts.denoiser.enable_gradient_checkpointing()

    def predict(
        self, noisy_BCHW: Tensor, timesteps_B: Tensor, condition: dict[str, Tensor], batch: dict[str, Any]
    ) -> Tensor:
        """The transformer's velocity [B, C, H, W] at these noisy latents.

        Raises: ModelError for a picture size that the transformer cannot take.
        """
        assert self.transformer is not None
        parts = self.loaded()
        family = FAMILIES[parts.family]
        pixels_per_latent = 2 ** (len(parts.vae.config.block_out_channels) - 1)
        height, width = noisy_BCHW.shape[-2:]
        family.check_size(self.transformer, height, width, pixels_per_latent)
        return family.predict(self.transformer, noisy_BCHW, timesteps_B, condition)
