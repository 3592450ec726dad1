"""TransformerTraining: flow matching of diffusion transformers, for any choice of trained weights.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.denoiser_training import DenoiserTraining
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.flow_objective import FlowLossWeighting, FlowObjective, TimestepSampling, check_flow
from lightning_aigc.diffusion.text_first import load_after_texts
from lightning_aigc.protocols import CachesCaptions


class TransformerTraining(DenoiserTraining):
    """Base class for diffusion transformers: timesteps, velocity and prediction.

    Args:
        timestep_sampling: Where training looks: uniform, logit_normal (most in the middle) or mode (most at the ends).
        flow_shift: Moves timesteps towards the noise, as sampling does: `auto` is the pipeline's own, 1 is none.
        loss_weighting: none; sigma_sqrt, sigma_squared (diffusers' preconditioned outputs) or cosmap.
        logit_mean: Mean of logit_normal; below 0 looks more at noise.
        logit_std: Its standard deviation.
        mode_scale: How far mode leans to the ends.
        training_guidance: What a guidance-distilled transformer (FLUX.1 dev) is told while it trains; others read none.
        sample_resolution: Pixels to a side of a sample picture; unset is the pipeline's own, mostly 1024.
        kwargs: Arguments of `DenoiserTraining` and `DiffusionModule`.
    """

    families: ClassVar[tuple[str, ...]] = tuple(TRANSFORMERS)

    def __init__(
        self,
        timestep_sampling: TimestepSampling = "logit_normal",
        flow_shift: float | Literal["auto"] = "auto",
        loss_weighting: FlowLossWeighting = "none",
        logit_mean: float = 0.0,
        logit_std: float = 1.0,
        mode_scale: float = 1.29,
        training_guidance: float = 1.0,
        sample_resolution: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.transformer: nn.Module | None = None
        check_flow(self.args)

    def load_components(self) -> Components:
        """The components; where the data module caches captions, after the text encoders have made them and left."""
        data: Any = self._trainer.datamodule if self._trainer is not None else None  # type: ignore[attr-defined]
        if isinstance(data, CachesCaptions) and data.caches_captions:
            return load_after_texts(self, data)
        return super().load_components()

    def adapt(self, parts: Components) -> None:
        args, family = self.args, TRANSFORMERS[parts.family]
        self.objective = FlowObjective(
            parts.scheduler_config,
            timestep_sampling=args.timestep_sampling,
            flow_shift=args.flow_shift,
            loss_weighting=args.loss_weighting,
            logit_mean=args.logit_mean,
            logit_std=args.logit_std,
            mode_scale=args.mode_scale,
            patch_size=family.patch_size(parts.denoiser),
            mu=family.mu,
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
        family = TRANSFORMERS[parts.family]
        family.check_size(self.transformer, parts.vae, *noisy_BCHW.shape[-2:])
        return family.predict(self.transformer, noisy_BCHW, timesteps_B, condition, self.args.training_guidance)
