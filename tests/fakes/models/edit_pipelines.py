"""Pipelines of the families that edit, with random weights, true in shape and small."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FluxKontextPipeline,
    FluxPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from fakes.models.transformer_pipelines import WIDTH, make_flux_pipeline, make_qwen_image_pipeline, qwen_shape

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip


def make_flux_kontext_pipeline(folder: Path) -> Path:
    parts = FluxPipeline.from_pretrained(make_flux_pipeline(folder), image_encoder=None, feature_extractor=None)
    FluxKontextPipeline(**parts.components).save_pretrained(folder)
    return folder


def make_qwen_image_edit_pipeline(folder: Path, plus: bool = False, zero_cond_t: bool = False) -> Path:
    """With a text encoder that sees images, of 64 tokens at most; `zero_cond_t` is 2511's."""
    parts = QwenImagePipeline.from_pretrained(make_qwen_image_pipeline(folder)).components
    torch.manual_seed(0)
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet())])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], extra_special_tokens=list(SPECIAL[1:]))
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessor(**sizes, size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16})
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in zip(("vision_start", "vision_end", "image", "video"), SPECIAL[3:], strict=True)
    }
    text = qwen_shape(2) | {
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}, "max_position_embeddings": 8192,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH,
        "patch_size": 14, "spatial_merge_size": 2, "fullatt_block_indexes": [0],
    }  # fmt: skip
    if zero_cond_t:
        parts["transformer"] = QwenImageTransformer2DModel.from_config(parts["transformer"].config, zero_cond_t=True)
    given: dict[str, Any] = parts | {
        "text_encoder": Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        ),
        "tokenizer": tokenizer,
        "processor": Qwen2VLProcessor(
            image_processor=images, tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor()
        ),
    }
    kind: Any = QwenImageEditPlusPipeline if plus else QwenImageEditPipeline
    kind(**given).save_pretrained(folder)
    return folder


def show_small(monkeypatch: pytest.MonkeyPatch, *sizes: tuple[int, int]) -> None:
    """Let Qwen-Image-Edit's pipelines leave sources of these sizes as they are for the transformer.

    They would scale every source to 1024 x 1024 pixels. The text encoder of Plus still sees 384 x 384.
    """
    by_ratio = {width / height: (width, height) for width, height in sizes}
    plus = pipeline_qwenimage_edit_plus
    usual = plus.calculate_dimensions

    def of_edit(area: int, ratio: float) -> tuple[int, int, None]:
        return (*by_ratio[ratio], None)

    def of_plus(area: int, ratio: float) -> tuple[int, int]:
        return usual(area, ratio) if area == plus.CONDITION_IMAGE_SIZE else by_ratio[ratio]

    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", of_edit)
    monkeypatch.setattr(plus, "calculate_dimensions", of_plus)


def scale_sources_to(side: int, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let Qwen-Image-Edit's pipelines scale sources to `side` squared pixels instead of 1024 squared, and 384."""
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        usual = module.calculate_dimensions
        put(module, "calculate_dimensions", lambda area, ratio, usual=usual: usual(min(area, side * side), ratio))


MAKE_EDIT: dict[str, Callable[[Path], Path]] = {
    "flux_kontext": make_flux_kontext_pipeline,
    "qwen_image_edit": make_qwen_image_edit_pipeline,
    "qwen_image_edit_plus": partial(make_qwen_image_edit_pipeline, plus=True, zero_cond_t=True),
}
"""By family, those that draw nothing without sources."""


def make_image(seed: int, width: int, height: int) -> Image.Image:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def to_pixels(*images: Image.Image) -> torch.Tensor:
    """Pictures of one size, float32 [N, 3, H, W] in -1..1."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float() / 127.5 - 1
