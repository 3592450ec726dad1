"""Refuse a denoiser with further inputs than noisy latents: inpainting, instructions, depth or edges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_aigc.diffusion.families import Family
from lightning_aigc.errors import ModelError

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
