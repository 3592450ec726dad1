"""Load a ControlNet, or make one from a U-Net, and write it as diffusers and ComfyUI read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_aigc.diffusion.families import Components
from lightning_aigc.diffusion.pipeline.loading import no_missing_weights
from lightning_aigc.diffusion.pipeline.saving import deferred, replaced_folder, save_part
from lightning_aigc.diffusion.pipeline.single_file_names import unet_name
from lightning_aigc.diffusion.pipeline.tensor_stream import write_tensors
from lightning_aigc.errors import ModelError

if TYPE_CHECKING:
    from diffusers import ControlNetModel

KEY = "model.init_args.controlnet_model_name_or_path"
HINT_CHANNELS = (16, 32, 96, 256)
"""Widths of the hint embedding, as in the paper; each after the first halves the condition."""
PREFIX = "control_model."


def make_controlnet(components: Components, name_or_path: str | None, revision: str | None) -> ControlNetModel:
    """A ControlNet of this pipeline in float32, frozen: a copy of the U-Net's encoder, or a given one.

    Raises: ModelError for one that cannot be loaded, or is of another family or autoencoder.
    """
    from diffusers import ControlNetModel

    factor = components.family.pixels_per_latent(components.vae)
    if name_or_path is None:
        channels = HINT_CHANNELS[: int(math.log2(factor)) + 1]
        if len(channels) != int(math.log2(factor)) + 1:
            raise ModelError(
                f"a ControlNet for an autoencoder of factor {factor} is not known here; factors up to 8 are"
            )
        made = ControlNetModel.from_unet(components.denoiser, conditioning_embedding_out_channels=channels)
        return _frozen(made)
    found = load_controlnet(ControlNetModel, name_or_path, revision)
    check_fits(found, components, name_or_path)
    return _frozen(found)


def load_controlnet(kind: Any, name_or_path: str, revision: str | None) -> Any:
    """A ControlNet of this class of diffusers in float32. Raises: ModelError for one that is none, or does not load."""
    where = {"revision": revision, "local_files_only": Path(name_or_path).is_dir()}
    with no_missing_weights(name_or_path, KEY):
        try:
            named = kind.load_config(name_or_path, **where).get("_class_name", kind.__name__)
            if named == kind.__name__:
                return kind.from_pretrained(name_or_path, **where, dtype=torch.float32)
        except Exception as error:  # diffusers raises anything from OSError to KeyError here
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ModelError(f"{KEY}: {name_or_path} does not load as a ControlNet: {first}") from error
    raise ModelError(f"{KEY}: {name_or_path} is a {named}, and this base takes a {kind.__name__}; use one of those")


def check_fits(controlnet: ControlNetModel, components: Components, name: str) -> None:
    """Raise ModelError if a ControlNet belongs to another family of U-Nets, or to an autoencoder of another factor."""
    keys = ("cross_attention_dim", "block_out_channels", "addition_embed_type", "in_channels")
    check_same_settings(controlnet, components, name, keys)
    factor = 2 ** (len(controlnet.config.conditioning_embedding_out_channels) - 1)
    wanted = components.family.pixels_per_latent(components.vae)
    if factor != wanted:
        raise ModelError(
            f"{KEY}: the hint embedding of {name} shrinks conditions by {factor}, and the autoencoder of"
            f" {components.source} images by {wanted}; use a ControlNet of this base, or null to begin from its U-Net"
        )


def check_same_settings(controlnet: Any, components: Components, name: str, keys: Sequence[str]) -> None:
    """Raise ModelError if the configs of a ControlNet and of the pipeline's denoiser differ in one of these keys."""
    for key in keys:
        first, second = _plain(controlnet.config.get(key)), _plain(components.denoiser.config.get(key))
        if first != second:
            raise ModelError(
                f"{KEY}: {name} is a ControlNet of another family: its {key} is {first}, that of {components.source}"
                f" {second}; use one that was trained for this base"
            )


def save_controlnet(folder: Path, single_file: Path, controlnet: ControlNetModel, dtype: torch.dtype | None) -> None:
    """Write a diffusers folder, and a single file for ComfyUI's `models/controlnet`."""
    with replaced_folder(folder) as unfinished:
        save_part(unfinished, controlnet, dtype)
    tensors = deferred(controlnet, dtype)
    layers = int(controlnet.config.layers_per_block)
    hints = len(controlnet.controlnet_cond_embedding.blocks)
    write_tensors(single_file, {PREFIX + single_file_name(n, layers, hints): t for n, t in tensors.items()})


def single_file_name(name: str, layers_per_block: int, hint_blocks: int) -> str:
    """The name of a ControlNet's parameter in lllyasviel's files, without their prefix.

    Source: lllyasviel/ControlNet, cldm/cldm.py.

    >>> single_file_name("controlnet_cond_embedding.blocks.1.weight", 2, 6), single_file_name("conv_in.bias", 2, 6)
    ('input_hint_block.4.weight', 'input_blocks.0.0.bias')
    """
    head, _, rest = name.partition(".")
    if head == "controlnet_cond_embedding":
        part, _, rest = rest.partition(".")
        if part == "conv_in":
            return f"input_hint_block.0.{rest}"
        if part == "conv_out":
            return f"input_hint_block.{2 * (hint_blocks + 1)}.{rest}"
        number, _, rest = rest.partition(".")
        return f"input_hint_block.{2 * (int(number) + 1)}.{rest}"
    if head == "controlnet_down_blocks":
        number, _, rest = rest.partition(".")
        return f"zero_convs.{number}.0.{rest}"
    if head == "controlnet_mid_block":
        return f"middle_block_out.0.{rest}"
    return unet_name(name, layers_per_block)


def _frozen(controlnet: Any) -> ControlNetModel:
    found: ControlNetModel = controlnet.float().requires_grad_(False).eval()
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
