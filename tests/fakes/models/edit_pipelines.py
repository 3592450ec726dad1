"""Pipelines of the families that edit, with random weights, true in shape and small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from PIL import Image

from fakes.models.transformer_pipelines import make_flux_pipeline


def make_flux_kontext_pipeline(folder: Path) -> Path:
    parts = FluxPipeline.from_pretrained(make_flux_pipeline(folder), image_encoder=None, feature_extractor=None)
    FluxKontextPipeline(**parts.components).save_pretrained(folder)
    return folder


MAKE_EDIT: dict[str, Callable[[Path], Path]] = {"flux_kontext": make_flux_kontext_pipeline}
"""By family, those that draw nothing without sources."""


def make_image(seed: int, width: int, height: int) -> Image.Image:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def to_pixels(*images: Image.Image) -> torch.Tensor:
    """Pictures of one size, float32 [N, 3, H, W] in -1..1."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float() / 127.5 - 1
