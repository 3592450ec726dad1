"""Family: the questions that every family of pipelines answers.

A latent is *unscaled* as the autoencoder has it, and *scaled* as the denoiser reads it.

Legend: B batch, N pictures, C channels, H and W latent height and width, S pixels, T text tokens, D text width, P
pooled width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_aigc.diffusion.components import Components


class Family(ABC):
    """One family of pipelines, as diffusers has it."""

    name: ClassVar[str]
    pipeline: ClassVar[str]
    """diffusers' class, as `model_index.json` names it."""
    folders: ClassVar[tuple[str, ...]]
    """What a pipeline folder must hold."""
    optional_folders: ClassVar[tuple[str, ...]] = ()
    """What it may lack, though diffusers' pipeline knows it."""
    caption_tokens: ClassVar[Mapping[str, int]] = {"tokenizer": 75}
    """By tokenizer, the most tokens of a caption that its encoder is given."""
    draws_latents: ClassVar[bool] = True
    """Whether training draws latents from the autoencoder's distribution or takes its mean, as diffusers' script."""

    # Text ------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def make_pipeline(self, parts: Components, scheduler: Any, controlnet: Any = None) -> Any:
        """diffusers' pipeline around these components."""

    @abstractmethod
    def make_scheduler(self, config: Mapping[str, Any]) -> Any:
        """The scheduler that pictures are sampled with."""

    @abstractmethod
    def encode_prompts(self, parts: Components, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        """Encode to `prompt_embeds` [B, T, D] and what else the denoiser reads, as the family's pipeline does.

        Where captions have unequal lengths, `prompt_lengths` int64 [B] counts the tokens that are not padding.
        """

    # Latents ---------------------------------------------------------------------------------------------------------

    def pixels_per_latent(self, vae: Any) -> int:
        """Pixels to a side of an unscaled latent's pixel."""
        return int(2 ** (len(vae.config.block_out_channels) - 1))

    def size_step(self, denoiser: Any, vae: Any) -> int:
        """Pixels that each side of an image must be a multiple of."""
        return self.pixels_per_latent(vae)

    def channels_read(self, vae_config: Mapping[str, Any]) -> int | None:
        """Channels of this autoencoder's latents as the denoiser reads them; None where the config does not say."""
        return vae_config.get("latent_channels")

    def encode(self, vae: Any, pixels_B3HW: Tensor) -> Tensor:
        """The mean and log-variance of unscaled latents, [B, 2C, H, W], of pixels in -1..1."""
        moments: Tensor = vae.encode(pixels_B3HW).latent_dist.parameters
        return moments

    def decode(self, vae: Any, latents_BCHW: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in -1..1 of unscaled latents."""
        pixels: Tensor = vae.decode(latents_BCHW).sample
        return pixels

    def scale(self, vae: Any, latents_BCHW: Tensor) -> Tensor:
        """Scaled latents of unscaled ones."""
        shift = float(getattr(vae.config, "shift_factor", None) or 0.0)
        return (latents_BCHW - shift) * float(vae.config.scaling_factor)

    def unscale(self, vae: Any, sampled: Tensor, height: int, width: int) -> Tensor:
        """Unscaled latents [B, C, H, W] of what the pipeline returns for `output_type="latent"`; H and W are given."""
        shift = float(getattr(vae.config, "shift_factor", None) or 0.0)
        return sampled / float(vae.config.scaling_factor) + shift

    def latents(self, vae: Any, moments_B2CHW: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Scaled latents; `draw` returns Gaussian noise like a tensor."""
        mean, log_variance = moments_B2CHW.chunk(2, dim=1)
        if self.draws_latents:
            mean = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * draw(mean)
        return self.scale(vae, mean)

    # Sampling --------------------------------------------------------------------------------------------------------

    def control_arguments(self, parts: Components, conditions_NCSS: Tensor, scale: float) -> dict[str, Any]:
        """The arguments of a ControlNet's pipeline for conditions in 0..1, on the pipeline's device.

        Raises: ModelError for a size that cannot be.
        """
        return {"image": conditions_NCSS, "controlnet_conditioning_scale": scale}

    def sample_size(self, denoiser: Any) -> int:
        """Unscaled latent pixels to a side of a sample picture."""
        return int(denoiser.config.sample_size)

    def sampling_arguments(
        self,
        parts: Components,
        prompts: list[str],
        negative_prompts: list[str] | None,
        guidance_scale: float,
        device: torch.device,
    ) -> dict[str, Any]:
        """The pipeline's arguments for prompts and guidance."""
        return {"prompt": prompts, "negative_prompt": negative_prompts, "guidance_scale": guidance_scale}
