"""Qwen-Image-Edit and its Plus: Qwen-Image's transformer, sources behind the noisy tokens, and a text that sees them.

The text encoder reads an instruction together with the source images, so that its embeddings belong to both.

Legend: B batch, C channels, H and W latent height and width, T text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.families import packed_latents, qwen_autoencoder
from lightning_aigc.diffusion.families.family import Components, StepMemory
from lightning_aigc.diffusion.families.qwen_image import QwenImage, qwen_inputs, text_arguments
from lightning_aigc.diffusion.families.transformer_control import ConditionEncoder
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily

if TYPE_CHECKING:
    from PIL.Image import Image

SEEN_AREA = 1024 * 1024
"""Pixels of the source as Qwen-Image-Edit's pipeline shows it to the text encoder."""
TIMESTEP_ZERO = "__index_timestep_zero__"
"""ComfyUI's marker of a transformer whose sources have a timestep of 0, an empty tensor."""


class QwenImageEdit(TransformerFamily):
    """One source, which the text encoder sees at 1024 x 1024 pixels."""

    name = "qwen_image_edit"
    title = "Qwen-Image-Edit"
    base = "Qwen/Qwen-Image-Edit"
    name_pattern = r"qwen.?image.?edit(?!.*(plus|25\d\d))"
    header_patterns: ClassVar[Mapping[str, str]] = {"qwen_image_edit": r"qwenimageedit(?!.*(plus|25\d\d))"}
    pipeline = "QwenImageEditPipeline"
    folders = (*QwenImage.folders, "processor")
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = QwenImage.lora_layers
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = QwenImage.original_layers
    shipped_config = QwenImage.shipped_config
    # With one source of the image's size, and a text of 1,400 tokens that holds the source.
    step_memory = StepMemory("Qwen-Image-Edit with one source", {None: 43.4, "int8": 25.6, "nf4": 16.1}, tokens=4800)
    last_text = QwenImage.last_text
    negative_prompt = QwenImage.negative_prompt
    guidance_argument = QwenImage.guidance_argument
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = QwenImage.published_sizes
    caption_tokens: ClassVar[Mapping[str, int]] = QwenImage.caption_tokens
    modelspec = "qwen-image-edit"
    draws_latents = False
    encodes_text_first = False  # samples need the text encoder with their sources
    max_sources = 1
    needs_sources = True
    text_sees_sources = True
    edit_pipeline = "QwenImageEditPipeline"
    edits_in_batches = False

    pixels_per_latent = qwen_autoencoder.pixels_per_latent
    encode = qwen_autoencoder.encode
    decode = qwen_autoencoder.decode
    scale = qwen_autoencoder.scale
    unscale = qwen_autoencoder.unscale
    tokens = packed_latents.tokens
    latents_of = packed_latents.latents_of
    channels_read = qwen_autoencoder.channels_read
    patch_size = packed_latents.patch_size
    inputs = qwen_inputs
    embedding_arguments = text_arguments

    def encode_instruction(
        self, pipeline: Any, instruction: str, sources: Sequence[Image], device: torch.device
    ) -> Tensor:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module

        (source,) = sources
        width, height, _ = module.calculate_dimensions(SEEN_AREA, source.width / source.height)
        seen = pipeline.image_processor.resize(source, height, width)
        embeddings_1TD: Tensor = pipeline.encode_prompt(instruction, image=seen, device=device)[0]
        return embeddings_1TD[0]

    def source_arguments(
        self,
        pipeline: Any,
        components: Components,
        images: Sequence[Sequence[Image]],
        latents: Sequence[Tensor],
        size: tuple[int, int],
    ) -> dict[str, Any]:
        # As an image: the pipeline scales it to 1024 x 1024 pixels, and takes no latents.
        pipeline.vae = ConditionEncoder(components.vae, weights_dtype(components.denoiser))
        return {"image": images[0][0]}


class QwenImageEditPlus(TransformerFamily):
    """One to three sources of unequal size, which the text encoder sees at 384 x 384 pixels, with their numbers.

    2511 has `zero_cond_t` in its transformer's config: the sources' tokens have a timestep of 0.
    """

    name = "qwen_image_edit_plus"
    title = "Qwen-Image-Edit-Plus"
    base = "Qwen/Qwen-Image-Edit-2511"
    name_pattern = r"qwen.?image.?edit.*(plus|25\d\d)"
    header_patterns: ClassVar[Mapping[str, str]] = {"qwen_image_edit_plus": r"qwenimageedit.*(plus|25\d\d)"}
    pipeline = "QwenImageEditPlusPipeline"
    folders = QwenImageEdit.folders
    lora_layers: ClassVar[Mapping[str, tuple[str, ...]]] = QwenImage.lora_layers
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = QwenImage.original_layers
    shipped_config = QwenImage.shipped_config
    step_memory = StepMemory(
        "Qwen-Image-Edit 2511 with one source", {None: 43.1, "int8": 25.3, "nf4": 15.8}, tokens=4250
    )
    last_text = QwenImage.last_text
    negative_prompt = QwenImage.negative_prompt
    guidance_argument = QwenImage.guidance_argument
    published_sizes: ClassVar[frozenset[tuple[int, int]]] = QwenImage.published_sizes
    caption_tokens: ClassVar[Mapping[str, int]] = QwenImage.caption_tokens
    modelspec = "qwen-image-edit-plus"
    draws_latents = False
    encodes_text_first = False
    max_sources = 3
    needs_sources = True
    text_sees_sources = True
    edit_pipeline = "QwenImageEditPlusPipeline"
    edits_in_batches = False

    pixels_per_latent = qwen_autoencoder.pixels_per_latent
    encode = qwen_autoencoder.encode
    decode = qwen_autoencoder.decode
    scale = qwen_autoencoder.scale
    unscale = qwen_autoencoder.unscale
    tokens = packed_latents.tokens
    latents_of = packed_latents.latents_of
    channels_read = qwen_autoencoder.channels_read
    patch_size = packed_latents.patch_size
    inputs = qwen_inputs
    embedding_arguments = text_arguments

    def marker_tensors(self, denoiser: Any) -> dict[str, Tensor]:
        return {TIMESTEP_ZERO: torch.empty(0)} if denoiser.config.zero_cond_t else {}

    def encode_instruction(
        self, pipeline: Any, instruction: str, sources: Sequence[Image], device: torch.device
    ) -> Tensor:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as module

        seen = []
        for source in sources:
            width, height = module.calculate_dimensions(module.CONDITION_IMAGE_SIZE, source.width / source.height)
            seen.append(pipeline.image_processor.resize(source, height, width))
        embeddings_1TD: Tensor = pipeline.encode_prompt(instruction, image=seen, device=device)[0]
        return embeddings_1TD[0]

    def source_arguments(
        self,
        pipeline: Any,
        components: Components,
        images: Sequence[Sequence[Image]],
        latents: Sequence[Tensor],
        size: tuple[int, int],
    ) -> dict[str, Any]:
        pipeline.vae = ConditionEncoder(components.vae, weights_dtype(components.denoiser))
        return {"image": list(images[0])}
