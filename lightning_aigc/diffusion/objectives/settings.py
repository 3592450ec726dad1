"""ObjectiveSettings: the options of DDPM and of flow matching, with their checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from torch import Tensor

from lightning_aigc.diffusion.objectives.noise import SeededNoise
from lightning_aigc.errors import ModelError
from lightning_aigc.setting_checks import check_not_negative, check_positive

LossType = Literal["l2", "huber", "smooth_l1"]
PredictionType = Literal["epsilon", "v_prediction", "sample"]
TimestepSampling = Literal["uniform", "logit_normal", "mode"]
FlowLossWeighting = Literal["none", "sigma_sqrt", "sigma_squared", "cosmap"]
DDPM_ONLY = ("prediction_type", "zero_terminal_snr", "snr_gamma", "debiased_estimation")
FLOW_ONLY = (
    "timestep_sampling", "flow_shift", "loss_weighting", "logit_mean", "logit_std", "mode_scale", "training_guidance",
)  # fmt: skip


@dataclass(frozen=True)
class ObjectiveSettings:
    """Options of the training objective. Stable Diffusion 1.x, 2.x and SDXL use DDPM, the other families flow matching.

    Args:
        loss_type: l2, huber or smooth_l1.
        huber_c: Error at which huber and smooth_l1 change from quadratic to linear.
        noise_offset: Share of noise common to a whole channel; 0.05 to 0.1 allows darker and brighter images.
        prediction_type: DDPM: epsilon, v_prediction or sample; unset takes the pipeline's.
        zero_terminal_snr: DDPM: rescale the schedule so that its last step is pure noise; needs v_prediction.
        snr_gamma: DDPM: min-SNR weighting; 5 is the paper's value, unset turns it off.
        debiased_estimation: DDPM: weight by 1 / sqrt(SNR) instead of min-SNR.
        timestep_sampling: Flow: distribution of the timesteps: uniform, logit_normal (most in the middle) or mode
            (most at the ends).
        flow_shift: Flow: shift of the timesteps towards the noise, as in sampling; `auto` is the pipeline's own, 1 is
            none.
        loss_weighting: Flow: none; sigma_sqrt, sigma_squared (diffusers' preconditioned outputs) or cosmap.
        logit_mean: Flow: mean of logit_normal; below 0 samples more noise.
        logit_std: Flow: standard deviation of logit_normal.
        mode_scale: Flow: weight of the ends in mode.
        training_guidance: Flow: guidance input of a guidance-distilled transformer (FLUX.1 dev) in training; others
            have no such input.
    """

    loss_type: LossType = "l2"
    huber_c: float = 0.1
    noise_offset: float = 0.0
    prediction_type: PredictionType | None = None
    zero_terminal_snr: bool = False
    snr_gamma: float | None = None
    debiased_estimation: bool = False
    timestep_sampling: TimestepSampling = "logit_normal"
    flow_shift: float | Literal["auto"] = "auto"
    loss_weighting: FlowLossWeighting = "none"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    training_guidance: float = 1.0

    def __post_init__(self) -> None:
        """Check the values. Raises: ModelError with the name of the first wrong one."""
        check_positive(self, "snr_gamma", "huber_c")
        check_not_negative(self, "noise_offset")
        if self.snr_gamma is not None and self.debiased_estimation:
            raise ModelError(
                "model.init_args.snr_gamma and debiased_estimation are alternative loss weights; set only one"
            )
        if self.flow_shift != "auto" and not 0 < float(self.flow_shift) < float("inf"):
            raise ModelError(f"model.init_args.flow_shift must be auto or a number above 0, got {self.flow_shift}")
        if not 0 < self.logit_std < float("inf"):
            raise ModelError(f"model.init_args.logit_std must be above 0 and finite, got {self.logit_std}")

    def check_objective(self, title: str, *, is_flow: bool) -> None:
        """Raise ModelError for a setting of the other objective.

        title: the family's, for the message.
        """
        defaults = {field.name: field.default for field in fields(ObjectiveSettings)}
        for name in DDPM_ONLY if is_flow else FLOW_ONLY:
            if getattr(self, name) != defaults[name]:
                own, other = ("flow matching", "DDPM") if is_flow else ("DDPM", "flow matching")
                raise ModelError(
                    f"model.init_args.{name}: {getattr(self, name)} is an option of {other}, and {title} trains by"
                    f" {own}; remove it"
                )


class Objective(Protocol):
    """Timesteps, noisy latents, target and loss weight of a training step."""

    schedule: Any
    """diffusers' scheduler; images are sampled with its config."""
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
        """The denoiser's target [B, C, H, W]."""
        ...

    def weights(self, timesteps_B: Tensor) -> Tensor:
        """The loss weight of each example, float32 [B]."""
        ...
