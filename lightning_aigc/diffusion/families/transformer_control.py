"""TransformerControl: the ControlNet of a family of diffusion transformers, with the defaults of two-stream models.

A ControlNet reads its transformer's inputs, and the condition as latents; its output is added to the transformer's
hidden states, block by block.

Legend: B batch, C channels, H and W latent height and width, N images, S pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from lightning_aigc.devices import float32_region, weights_dtype
from lightning_aigc.diffusion.families.family import Components, Control
from lightning_aigc.diffusion.families.tokens import check_divides


class TransformerControl(Control):
    """ControlNet of a diffusion transformer; it reads the condition as latents.

    Args:
        network: diffusers' class of the ControlNet.
        pipeline: diffusers' class of the pipeline.
        layers: Default number of blocks of a new ControlNet, by `DiffusionControlNet`'s argument: as diffusers' script,
            if there is one.
        path: Names of the modules that read the condition and of those that write the residuals.
        config: Config entries of a new ControlNet that the transformer's config lacks.
    """

    def __init__(
        self,
        network: str,
        pipeline: str,
        layers: Mapping[str, int],
        path: tuple[str, ...] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.network, self.pipeline, self.layers = network, pipeline, layers  # type: ignore[misc]
        self.path, self.config = path, config or {}

    # Training --------------------------------------------------------------------------------------------------------

    def residuals(
        self,
        components: Components,
        controlnet: Any,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        hint: Tensor,
        batch: Mapping[str, Any],
        guidance: float = 1.0,
    ) -> dict[str, Any]:
        family: Any = components.family
        inputs = family.inputs(controlnet, noisy_BCHW, timesteps_B, condition, guidance)
        hint = family.tokens(hint).to(weights_dtype(controlnet))
        return dict(controlnet(**inputs, controlnet_cond=hint, return_dict=True))

    def condition_latents(
        self, components: Components, controlnet: Any, moments_B2CHW: Tensor, draw: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The condition's latents as the ControlNet reads them; `draw` as in `Family.latents`."""
        return components.family.latents(components.vae, moments_B2CHW, draw)

    def lend(self, controlnet: nn.Module, transformer: nn.Module) -> None:
        """Give the ControlNet the transformer's modules that it runs; most ControlNets have copies of them."""

    def edge_path(self, controlnet: nn.Module) -> tuple[str, ...]:
        return self.path

    # A new ControlNet ------------------------------------------------------------------------------------------------

    def block_counts(self, transformer: Any) -> dict[str, int]:
        """The transformer's numbers of blocks, by the keys of `layers`."""
        return {name: int(transformer.config[name]) for name in self.layers}

    def control_counts(self, blocks: int) -> list[int]:
        """Valid ControlNet depths for a transformer with `blocks` blocks, which must read each residual."""
        return [count for count in range(1, blocks + 1) if (blocks - 1) // -(-blocks // count) == count - 1]

    def control_config(self, transformer: Any, counts: Mapping[str, int]) -> dict[str, Any]:
        """Config entries of a new ControlNet with these block counts that the transformer's config lacks."""
        return {**self.config, **counts}

    def copied_weights(self, controlnet: Any, transformer: nn.Module) -> dict[str, Tensor]:
        """The transformer's weights that a new ControlNet starts from, by the ControlNet's names."""
        own = controlnet.state_dict()
        return {name: weight for name, weight in transformer.state_dict().items() if name in own}

    def misfit(self, controlnet: Any, transformer: Any) -> str | None:
        """A clause that says why a given ControlNet does not fit this transformer in spite of equal shapes."""
        return None

    # Sampling --------------------------------------------------------------------------------------------------------

    def make_pipeline(self, pipeline: Any, components: Components, controlnet: Any) -> Any:
        """diffusers' ControlNet pipeline with the components of the family's pipeline."""
        made = getattr(diffusers, self.pipeline)(**pipeline.components, controlnet=controlnet)
        self.lend(controlnet, components.denoiser)
        made.vae = ConditionEncoder(components.vae, weights_dtype(components.denoiser))
        return made

    def sampling_arguments(self, components: Components, conditions_NCSS: Tensor, scale: float) -> dict[str, Any]:
        family: Any = components.family
        height, width = conditions_NCSS.shape[-2:]
        pixels_per_latent = family.pixels_per_latent(components.vae)
        check_divides(family.patch_size(components.denoiser) * pixels_per_latent, 1, height, width)
        family.check_size(components.denoiser, components.vae, height // pixels_per_latent, width // pixels_per_latent)
        return {
            "control_image": to_pixels(conditions_NCSS), "height": height, "width": width,
            "controlnet_conditioning_scale": scale,
        }  # fmt: skip


class ConditionEncoder:
    """The autoencoder for a ControlNet's pipeline: it encodes in its own dtype, without autocast.

    Args:
        vae: The autoencoder.
        dtype: Dtype of the networks that read the latents.
    """

    def __init__(self, vae: Any, dtype: torch.dtype) -> None:
        self.vae, self.dtype = vae, dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vae, name)

    def encode(self, pixels: Tensor) -> SimpleNamespace:
        with float32_region(pixels.device):
            moments = self.vae.encode(pixels.to(self.vae.dtype)).latent_dist.parameters
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        return SimpleNamespace(latent_dist=DiagonalGaussianDistribution(moments.to(self.dtype)))


def to_pixels(conditions_BCSS: Tensor) -> Tensor:
    """Conditions in 0..1 in the autoencoder's range -1..1; the hidden region of inpainting becomes black."""
    return conditions_BCSS.clamp(0, 1) * 2 - 1
