"""Check before the first step that the model takes the data: its channels, its image sizes, its sources of an edit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning_aigc.diffusion.families import FAMILIES, Components, Family
from lightning_aigc.diffusion.families.transformer_family import NO_SOURCES
from lightning_aigc.errors import ModelError

PIPELINE_STEP = 8
"""Pixels that diffusers' pipelines want both sides to be multiples of, whatever the model reads."""


def check_sources(family: Family, name: str, count: int) -> None:
    """Raise ModelError for an edit model without sources, or for more sources than it reads. Reads no weights."""
    if family.needs_sources and not count:
        raise ModelError(f"{name} is a {family.pipeline}: {family.title} {NO_SOURCES}")
    if count and not family.max_sources:
        edits = ", ".join(each.base for each in FAMILIES.values() if each.max_sources)
        raise ModelError(
            f"the data has source images, and {name} is a {family.pipeline}, which draws from text alone; set {KEY} to"
            f" a model that edits, such as {edits}, or set data.init_args.source_data_dir: null"
        )
    if count > family.max_sources:
        raise ModelError(
            f"the data has {count} source images for each image, and {family.title} reads {family.max_sources}; set"
            f" data.init_args.source_data_dir to {family.max_sources} of them"
        )


@runtime_checkable
class HasImageSizes(Protocol):
    """A data module that knows its images' sizes before the first batch."""

    def image_sizes(self) -> Sequence[tuple[int, int]]:
        """Return each (width, height) of training and held-out images in pixels."""
        ...

    def size_remedy(self, step: int) -> str:
        """Return what to set so that all sides are multiples of `step`, for an error message."""
        ...


def check_sample_size(components: Components, side: int | None, key: str) -> None:
    """Raise ModelError for a side of samples in pixels that the pipeline does not draw; None is the pipeline's own."""
    if side is None:
        return
    family, pixels = components.family, components.family.pixels_per_latent(components.vae)
    step = math.lcm(PIPELINE_STEP, family.size_step(components.denoiser, components.vae))
    if side < step or side % step:
        near = max(step, round(side / step) * step)
        raise ModelError(f"{key} must be a multiple of {step} pixels for {family.title}, got {side}; use {near}")
    family.check_size(components.denoiser, components.vae, side // pixels, side // pixels)


def check_sample_steps(components: Components, steps: int | None, key: str) -> None:
    """Raise ModelError for more denoising steps than the schedule of a U-Net was made of; None is the run's own."""
    most = components.scheduler_config.get("num_train_timesteps", math.inf)
    if steps is not None and not components.family.is_flow and steps > most:
        raise ModelError(
            f"{key} must be at most {most}, the timesteps of {components.source}, got {steps}; 25 is usual"
        )


def check_image_sizes(components: Components, data: object) -> None:
    """Raise ModelError for a size of the data, held-out images among them, that the denoiser cannot take."""
    if not isinstance(data, HasImageSizes):
        return
    family = components.family
    sizes = data.image_sizes()
    step, side = family.size_step(components.denoiser, components.vae), family.pixels_per_latent(components.vae)
    odd = [(width, height) for width, height in sizes if width % step or height % step]
    if odd:
        others = f" (and {len(odd) - 1} more sizes)" if len(odd) > 1 else ""
        raise ModelError(
            f"images of {odd[0][0]} x {odd[0][1]} pixels{others} cannot be trained on: both sides must be multiples of"
            f" {step}, as this {family.denoiser_name} reads them; {data.size_remedy(step)}"
        )
    for width, height in sizes:
        family.check_size(components.denoiser, components.vae, height // side, width // side)


KEY = "model.init_args.pretrained_model_name_or_path"
FIRST_LAYER = "model.diffusion_model.input_blocks.0.0.weight"
LAST_LAYER = "model.diffusion_model.out.2.weight"
LATENTS_LAYER = "first_stage_model.post_quant_conv.weight"
"""In a single-file checkpoint, the layers that read and answer noisy latents, and one that reads clean ones."""


def check_channels(family: Family, name: str, denoiser: Mapping[str, Any], vae: Mapping[str, Any]) -> None:
    """Raise ModelError if a denoiser's config has other channels than latents of this autoencoder's config."""
    wanted = family.channels_read(vae)
    if wanted is None:
        return
    network = "transformer" if family.is_flow else "U-Net"
    for key, does in (("in_channels", "reads"), ("out_channels", "answers")):
        given = denoiser.get(key)
        if given is None or given == wanted or (key == "out_channels" and family.is_flow):
            continue
        made_from = f", such as {family.base}" if family.is_flow else ""
        raise ModelError(
            f"{KEY}: the {network} of {name} {does} {given} channels, and latents of its autoencoder have {wanted}, so"
            " it is a model of inpainting, editing, depth or upscaling, which needs more than images and captions; use"
            f" the text-to-image model that it was made from{made_from}"
        )


def channels_of_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The channels of a single file's U-Net and autoencoder, as their configs would say them."""
    from diffusers.loaders.single_file_utils import load_single_file_checkpoint

    checkpoint = load_single_file_checkpoint(str(path))
    unet = {}
    for key, layer, axis in (("in_channels", FIRST_LAYER, 1), ("out_channels", LAST_LAYER, 0)):
        if layer in checkpoint:
            unet[key] = int(checkpoint[layer].shape[axis])
    vae = {"latent_channels": int(checkpoint[LATENTS_LAYER].shape[1])} if LATENTS_LAYER in checkpoint else {}
    return unet, vae
