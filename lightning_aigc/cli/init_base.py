"""The base model and the card that a config is written for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_aigc.diffusion.components import check_source, family_of_checkpoint
from lightning_aigc.errors import ConfigError, ModelError
from lightning_aigc.tiny.embedded import PREFIX, resolve

HUB = {
    "sd15": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
}
NATIVE_SIDE = {"sd": 512, "sdxl": 1024}
KINDS_BY_GIB = ((22, "24gb"), (11, "12gb"), (7, "8gb"), (5, "6gb"))
"""The card from so many GiB on; a card shows a little less than its name says."""
CARDS = ("4gb", "6gb", "8gb", "12gb", "24gb", "910b")


@dataclass(frozen=True)
class Base:
    """A base model: where it is, its family, and the side in pixels that it was trained at."""

    source: str
    family: str
    """sd or sdxl."""
    side: int
    reason: str
    """How the family is known."""


@dataclass(frozen=True)
class Card:
    """One of CARDS, and why."""

    kind: str
    reason: str
    precision: str | None = None
    """The precision that it needs where that is not the config's."""


def find_base(given: str) -> Base:
    """The base for `sd15`, `sdxl`, a pipeline folder, a checkpoint file, a hub id or `embedded:sd`.

    Raises: ConfigError or ModelError for a path that is no model.
    """
    if given in HUB:
        family = "sdxl" if given == "sdxl" else "sd"
        return Base(HUB[given], family, NATIVE_SIDE[family], f"--base {given}")
    check_source(given)
    path = resolve(given)
    if path.is_dir():
        described = json.loads((path / "model_index.json").read_text(encoding="utf-8"))
        family = "sdxl" if described["_class_name"] == "StableDiffusionXLPipeline" else "sd"
        return Base(given, family, _side_of(path), f"a {described['_class_name']} folder")
    if path.is_file():
        try:
            family = family_of_checkpoint(path)
        except Exception as error:  # diffusers and safetensors raise nearly anything for a file of another kind
            raise ModelError(
                f"--base {given} does not read as a Stable Diffusion checkpoint ({str(error).splitlines()[0]}); give"
                " a .safetensors checkpoint or a pipeline folder"
            ) from error
        return Base(given, family, NATIVE_SIDE[family], "read from the checkpoint")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        raise ConfigError(f"--base {given} is no folder, no file and no hub id; use sd15, sdxl or a path")
    family = "sdxl" if "xl" in given.casefold() else "sd"
    return Base(
        given, family, NATIVE_SIDE[family], f"guessed from the name: {'SDXL' if family == 'sdxl' else 'SD 1.5'}"
    )


def is_embedded(base: Base) -> bool:
    return base.source.startswith(PREFIX)


def find_card(given: str | None) -> Card:
    """The given card, else this machine's, else 12gb."""
    if given is not None:
        return Card(given, f"--card {given}")
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return Card("910b", f"found {npu.get_device_name(0)}")
    if torch.cuda.is_available():
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        kind = next((name for least, name in KINDS_BY_GIB if gib > least), "4gb")
        precision = None if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
        return Card(kind, f"found {torch.cuda.get_device_name(0)} with {gib:.0f} GiB", precision)
    return Card("12gb", "no card here, so values for 12 GB; --card 4gb, 6gb, 8gb, 24gb or 910b writes others")


def _side_of(pipeline: Path) -> int:
    """The side of the pictures that a pipeline folder was made for: latents times the autoencoder's step."""
    try:
        unet, vae = (json.loads((pipeline / part / "config.json").read_text("utf-8")) for part in ("unet", "vae"))
        side: int = unet["sample_size"] * 2 ** (len(vae["block_out_channels"]) - 1)
        return side
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"the configs of {pipeline}'s unet/ and vae/ cannot be read ({error}); copy it again"
        ) from error
