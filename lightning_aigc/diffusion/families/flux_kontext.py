"""FLUX.1 Kontext: FLUX.1's transformer, which reads the tokens of the image to edit behind the noisy ones.

Legend: B batch, C channels, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from lightning_aigc.diffusion.families import packed_latents
from lightning_aigc.diffusion.families.family import Components, StepMemory
from lightning_aigc.diffusion.families.flux import Flux, encode_with_pooled, flux_inputs
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

    tokens = packed_latents.tokens
    latents_of = packed_latents.latents_of
    unscale = packed_latents.unscale
    channels_read = packed_latents.channels_read
    patch_size = packed_latents.patch_size
    encode_with = encode_with_pooled
    inputs = flux_inputs

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
