"""FLUX.1 Kontext: FLUX.1's transformer, which reads the tokens of the image to edit behind the noisy ones.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_aigc.diffusion.families.family import Components, StepMemory
from lightning_aigc.diffusion.families.flux import Flux, flux_inputs
from lightning_aigc.diffusion.families.tokens import pack, unpack, unpack_first
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily

if TYPE_CHECKING:
    from PIL.Image import Image


class FluxKontext(TransformerFamily):
    """FLUX.1's text encoders and layers; one source image, told apart by its positions' first number."""

    name = "flux_kontext"
    title = "FLUX.1 Kontext"
    base = "black-forest-labs/FLUX.1-Kontext-dev"
    name_pattern = r"^(?!.*(qwen.?image|(?<![a-z])z.?image|klein)).*kontext"
    header_patterns: ClassVar[Mapping[str, str]] = {"flux_kontext": r"flux.*kontext"}
    pipeline = "FluxKontextPipeline"
    folders = Flux.folders
    optional_folders = Flux.optional_folders
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = Flux.lora_layers
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = Flux.original_layers
    widening: ClassVar[Mapping[str, int]] = Flux.widening
    shipped_config = "flux_qlora_12gb.yaml"
    # An image and its source have the tokens of FLUX.1's image of 1456 px, which was counted with the whole base. The
    # activations do not depend on the format of the weights.
    step_memory = StepMemory("FLUX.1 Kontext dev with one source", {None: 28.2, "int8": 17.8, "nf4": 12.2}, tokens=6300)
    negative_prompt = None
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = Flux.published_sizes
    caption_tokens: ClassVar[Mapping[str, int]] = Flux.caption_tokens
    modelspec = "flux-1-kontext"
    draws_latents = False
    max_sources = 1
    edit_pipeline = "FluxKontextPipeline"
    needs_sources = True

    def encode_with(self, pipeline: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
        embeddings, pooled, _ = pipeline.encode_prompt(prompts, device=device)
        return {"prompt_embeds": embeddings, "pooled_prompt_embeds": pooled}

    def unscale(self, vae: Any, sampled: Tensor, height: int, width: int) -> Tensor:
        return super().unscale(vae, unpack(sampled, height, width), height, width)

    def tokens(self, latents_BCHW: Tensor) -> Tensor:
        return pack(latents_BCHW)

    def latents_of(self, answer: Tensor, height: int, width: int) -> Tensor:
        return unpack_first(answer, height, width)

    def inputs(
        self,
        network: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float,
    ) -> dict[str, Any]:
        return flux_inputs(network, noisy_BCHW, timesteps_B, condition, guidance)

    def source_arguments(
        self,
        pipeline: Any,
        components: Components,
        images: Sequence[Sequence[Image]],
        latents: Sequence[Tensor],
        size: tuple[int, int],
    ) -> dict[str, Any]:
        # As latents, which the pipeline takes as they are; it would encode pixels under autocast.
        return {"image": latents[0], "max_area": size[0] * size[1]}

    def channels_read(self, vae_config: Mapping[str, Any]) -> int | None:
        channels = vae_config.get("latent_channels")
        return None if channels is None else 4 * int(channels)  # tokens of 2 x 2

    def patch_size(self, denoiser: Any) -> int:
        return 2
