"""A denoiser that reads more than noisy latents is refused in one sentence, before anything is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_aigc.cli.init.base import find_base
from lightning_aigc.diffusion import (
    ControlNetTraining,
    DiffusionControlNet,
    DiffusionFineTuning,
    DiffusionLoRA,
    StableDiffusionFineTuning,
    StableDiffusionLoRA,
)
from lightning_aigc.diffusion.families import FAMILIES, TRANSFORMERS
from lightning_aigc.diffusion.pipeline.image_sizes import FIRST_LAYER, LAST_LAYER, LATENTS_LAYER, check_channels
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError

PUBLISHED = {
    "sd": ({"in_channels": 4, "out_channels": 4}, {"latent_channels": 4}),
    "sdxl": ({"in_channels": 4, "out_channels": 4}, {"latent_channels": 4}),
    "sd3": ({"in_channels": 16, "out_channels": 16}, {"latent_channels": 16}),
    "flux": ({"in_channels": 64, "out_channels": None}, {"latent_channels": 16}),
    "flux_kontext": ({"in_channels": 64, "out_channels": None}, {"latent_channels": 16}),
    "flux2": ({"in_channels": 128, "out_channels": None}, {"latent_channels": 32}),
    "z_image": ({"in_channels": 16}, {"latent_channels": 16}),
    **dict.fromkeys(
        ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus"),
        ({"in_channels": 64, "out_channels": 16}, {"z_dim": 16}),
    ),
    "flux2_dev": ({"in_channels": 128, "out_channels": None}, {"latent_channels": 32}),
    "chroma": ({"in_channels": 64, "out_channels": None}, {"latent_channels": 16}),
    "krea2": ({"in_channels": 64}, {"z_dim": 16}),
}
"""Configs of the published models."""


def with_config(source: str | Path, copy: Path, part: str, **entries: Any) -> str:
    shutil.copytree(source, copy)
    file = copy / part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return str(copy)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_published_models_are_taken_and_twice_their_channels_are_not(family: str) -> None:
    denoiser, vae = PUBLISHED[family]
    check_channels(FAMILIES[family], "a", denoiser, vae)
    with pytest.raises(ModelError, match=rf"reads {2 * denoiser['in_channels']} channels"):
        check_channels(FAMILIES[family], "a", denoiser | {"in_channels": 2 * denoiser["in_channels"]}, vae)


@pytest.mark.parametrize("kind", [StableDiffusionLoRA, StableDiffusionFineTuning, ControlNetTraining])
@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"in_channels": 9}, "U-Net of .* reads 9 channels, and latents of its autoencoder have 4, .*inpainting"),
        ({"in_channels": 8}, "reads 8 channels"),
        ({"in_channels": 5}, "reads 5 channels"),
        ({"out_channels": 8}, "answers 8 channels"),
    ],
)
def test_a_unet_of_other_channels_is_refused_by_its_config(
    kind: Any, entries: dict[str, int], said: str, tmp_path: Path
) -> None:
    folder = with_config(resolve("embedded:sd"), tmp_path / "a", "unet", **entries)
    (tmp_path / "a" / "unet" / "diffusion_pytorch_model.safetensors").unlink(missing_ok=True)  # no weight is read
    with pytest.raises(ModelError, match=said):
        kind(folder).configure_model()
    with pytest.raises(ModelError, match=said):
        find_base(folder)


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_a_transformer_of_other_channels_is_refused_with_a_base_to_use(
    family: str, transformers: Callable[[str], str], tmp_path: Path
) -> None:
    folder = with_config(transformers(family), tmp_path / "a", "transformer", in_channels=96)
    for kind in (
        DiffusionLoRA,
        DiffusionFineTuning,
        *([DiffusionControlNet] if TRANSFORMERS[family].control is not None else []),
    ):
        with pytest.raises(ModelError, match=rf"reads 96 channels.* such as {TRANSFORMERS[family].base}$"):
            kind(folder).configure_model()


def test_a_single_file_of_an_inpainting_unet_is_refused_by_its_first_layer(tmp_path: Path) -> None:
    layers = {FIRST_LAYER: (320, 9, 3, 3), LAST_LAYER: (4, 320, 3, 3), LATENTS_LAYER: (4, 4, 1, 1)}
    save_file({name: torch.zeros(shape) for name, shape in layers.items()}, tmp_path / "inpainting.safetensors")
    with pytest.raises(ModelError, match="reads 9 channels"):
        StableDiffusionLoRA(str(tmp_path / "inpainting.safetensors")).configure_model()
