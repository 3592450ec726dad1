"""ControlledFamily: what a family of diffusion transformers answers about its ControlNet, where diffusers has one.

A ControlNet reads what its transformer reads, and the condition as latents; what it makes is added to the transformer's
hidden states, block by block.

Legend: B batch, C channels, H and W latent height and width, N pictures, S pixels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import diffusers
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn

from lightning_aigc.devices import float32_region, weights_dtype
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily, check_divides

if TYPE_CHECKING:
    from lightning_aigc.diffusion.components import Components


class ControlledFamily(TransformerFamily):
    """One family of diffusion transformers that diffusers has a ControlNet for."""

    controlnet: ClassVar[str]
    """diffusers' class of the ControlNet."""
    controlnet_pipeline: ClassVar[str]
    control_layers: ClassVar[Mapping[str, int]]
    """By `DiffusionControlNet`'s argument, how many blocks of a kind a new one has: as diffusers' script, if any."""

    # What networks read and answer ----------------------------------------------------------------------------------

    @abstractmethod
    def predict(
        self,
        denoiser: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float = 1.0,
        residuals: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The velocity, as `TransformerFamily.predict`; `residuals` are those of a ControlNet."""

    @abstractmethod
    def residuals(
        self,
        controlnet: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        shown_BCHW: Tensor,
        guidance: float = 1.0,
    ) -> dict[str, Any]:
        """What a ControlNet that is shown these latents adds, as the transformer's arguments."""

    def condition_latents(
        self, vae: Any, controlnet: Any, moments_B2CHW: Tensor, draw: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The condition's latents as the ControlNet reads them; `draw` as in `latents`."""
        return self.latents(vae, moments_B2CHW, draw)

    def lend(self, controlnet: nn.Module, transformer: nn.Module) -> None:
        """Give a ControlNet what it runs of the transformer's own modules; most hold copies of all that they run."""

    @abstractmethod
    def edge_path(self, controlnet: nn.Module) -> tuple[str, ...]:
        """Names of the modules that read the condition and of those that write what is added to the transformer."""

    # A new ControlNet -----------------------------------------------------------------------------------------------

    def block_counts(self, transformer: Any) -> dict[str, int]:
        """How many blocks the transformer has, by the names in `control_layers`."""
        return {name: int(transformer.config[name]) for name in self.control_layers}

    @abstractmethod
    def control_counts(self, blocks: int) -> list[int]:
        """How many blocks a ControlNet may have, so that a transformer of so many reads each of them."""

    @abstractmethod
    def control_config(self, transformer: Any, counts: Mapping[str, int]) -> dict[str, Any]:
        """What the config of a new ControlNet of so many blocks says that the transformer's does not."""

    def copied_weights(self, controlnet: nn.Module, transformer: nn.Module) -> dict[str, Tensor]:
        """The weights that a new ControlNet begins with, by its names."""
        own = controlnet.state_dict()
        return {name: weight for name, weight in transformer.state_dict().items() if name in own}

    def misfit(self, controlnet: Any, transformer: Any) -> str | None:
        """A clause on why a given ControlNet cannot stand beside this transformer, though their shapes agree."""
        return None

    # Sampling -------------------------------------------------------------------------------------------------------

    def make_pipeline(self, parts: Components, scheduler: Any, controlnet: Any = None) -> Any:
        pipeline = super().make_pipeline(parts, scheduler)
        if controlnet is None:
            return pipeline
        pipeline = getattr(diffusers, self.controlnet_pipeline)(**pipeline.components, controlnet=controlnet)
        self.lend(controlnet, parts.denoiser)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.vae = ConditionEncoder(parts.vae, weights_dtype(parts.denoiser))
        return pipeline

    def control_arguments(self, parts: Components, conditions_NCSS: Tensor, scale: float) -> dict[str, Any]:
        height, width = conditions_NCSS.shape[-2:]
        pixels_per_latent = self.pixels_per_latent(parts.vae)
        check_divides(self.patch_size(parts.denoiser) * pixels_per_latent, 1, height, width)
        self.check_size(parts.denoiser, parts.vae, height // pixels_per_latent, width // pixels_per_latent)
        shown = to_pixels(conditions_NCSS)
        return {
            "control_image": shown, "height": height, "width": width, "controlnet_conditioning_scale": scale,
        }  # fmt: skip


class ConditionEncoder:
    """The autoencoder as a ControlNet's pipeline asks it: it encodes in its own dtype, without autocast.

    Args:
        vae: The autoencoder.
        dtype: That of the networks which read the latents.
    """

    def __init__(self, vae: Any, dtype: torch.dtype) -> None:
        self.vae, self.dtype = vae, dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vae, name)

    def encode(self, pixels: Tensor) -> SimpleNamespace:
        with float32_region(pixels.device):
            moments = self.vae.encode(pixels.to(self.vae.dtype)).latent_dist.parameters
        return SimpleNamespace(latent_dist=DiagonalGaussianDistribution(moments.to(self.dtype)))


def to_pixels(conditions_BCSS: Tensor) -> Tensor:
    """Conditions in 0..1 as an autoencoder reads pictures, in -1..1; what inpainting hides is black."""
    return conditions_BCSS.clamp(0, 1) * 2 - 1
