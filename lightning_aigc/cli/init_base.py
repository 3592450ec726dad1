"""The base model that a config is written for: where it is, its family and its pictures' side."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_aigc.diffusion.components import (
    PIPELINES,
    FamilyName,
    check_channels_of_folder,
    check_not_distilled,
    check_source,
    family_of_checkpoint,
)
from lightning_aigc.diffusion.families import FAMILIES, TRANSFORMERS, U_NETS
from lightning_aigc.embedded import PREFIX, resolve
from lightning_aigc.errors import ConfigError, ModelError

SHORT: dict[str, tuple[str, FamilyName]] = {
    "sd15": ("stable-diffusion-v1-5/stable-diffusion-v1-5", "sd"),
    "sdxl": ("stabilityai/stable-diffusion-xl-base-1.0", "sdxl"),
    "sd3": (TRANSFORMERS["sd3"].base, "sd3"),
    "flux": (TRANSFORMERS["flux"].base, "flux"),
    "flux2": (TRANSFORMERS["flux2"].base, "flux2"),
    "z_image": (TRANSFORMERS["z_image"].base, "z_image"),
    "qwen_image": (TRANSFORMERS["qwen_image"].base, "qwen_image"),
}
"""By the name that `--base` takes: a hub id and its family."""
TITLES: dict[FamilyName, str] = {
    "sd": "SD 1.5", "sdxl": "SDXL", "sd3": "Stable Diffusion 3", "flux": "FLUX.1", "flux2": "FLUX.2 klein",
    "z_image": "Z-Image", "qwen_image": "Qwen-Image",
}  # fmt: skip
NAMES: tuple[tuple[str, FamilyName], ...] = (
    (r"qwen.?image", "qwen_image"),
    (r"(?<![a-z])z.?image", "z_image"),
    (r"klein", "flux2"),
    (r"flux(?!.?2(?!\d))", "flux"),
    (r"stable.?diffusion.?v?3|(?<![a-z])sd.?3", "sd3"),
    (r"xl", "sdxl"),
)
"""What a hub id holds, in small letters, that tells its family; the first that is found counts."""
NATIVE_SIDE = {"sd": 512}
"""In pixels, of families whose models were not trained at 1024."""


@dataclass(frozen=True)
class Base:
    """A base model: where it is, its family, and the side in pixels that it was trained at."""

    source: str
    family: FamilyName
    side: int
    reason: str
    """How the family is known."""


def find_base(given: str) -> Base:
    """The base for a name in `SHORT`, a pipeline folder, a checkpoint file, a hub id or `embedded:sd`.

    Raises: ConfigError or ModelError for a path that is no model, or a model that is distilled or of no known family.
    """
    if given in SHORT:
        source, family = SHORT[given]
        return Base(source, family, _native_side(family), f"--base {given}")
    check_source(given, tuple(FAMILIES))
    path = resolve(given)
    if path.is_dir():
        described = json.loads((path / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
        family = PIPELINES[described]
        base = Base(given, family, _side_of(path, family), f"a {described} folder")
        check_channels_of_folder(path, family, given)
        return base
    if path.is_file():
        return Base(given, family := _family_of_file(given, path), _native_side(family), "read from the checkpoint")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        raise ConfigError(f"--base {given} is no folder, no file and no hub id; use {', '.join(SHORT)} or a path")
    family = _family_of_name(given)
    check_not_distilled(family, given)
    return Base(given, family, _native_side(family), f"guessed from the name: {TITLES[family]}")


def _native_side(family: FamilyName) -> int:
    return NATIVE_SIDE.get(family, 1024)


def _family_of_file(given: str, path: Path) -> FamilyName:
    """The family of a single-file checkpoint. Raises: ModelError for a file that holds none, or of another family."""
    try:
        return family_of_checkpoint(path)
    except ModelError:
        raise
    except Exception as error:  # diffusers and safetensors raise nearly anything for a file of another kind
        raise ModelError(
            f"--base {given} does not read as a Stable Diffusion checkpoint ({str(error).splitlines()[0]}); give"
            " a .safetensors checkpoint or a pipeline folder"
        ) from error


def _family_of_name(given: str) -> FamilyName:
    """The family that a hub id's name tells, else Stable Diffusion 1.5's. Raises: ConfigError for FLUX.2 but klein."""
    name = given.casefold()
    found = next((family for pattern, family in NAMES if re.search(pattern, name)), None)
    if found is None and "flux" in name:
        raise ConfigError(
            f"--base {given} is a FLUX.2 that is not named klein, and of FLUX.2 only klein trains here; use"
            f" {TRANSFORMERS['flux2'].base}, or download it and give its folder"
        )
    return found or "sd"


def is_embedded(base: Base) -> bool:
    return base.source.startswith(PREFIX)


def _side_of(pipeline: Path, family: FamilyName) -> int:
    """The side of the pictures that a pipeline folder was made for: latents times the autoencoder's step.

    Raises: ModelError for configs that cannot be read, or do not say it.
    """
    denoiser, vae = (_configured(pipeline, part) for part in ("unet" if family in U_NETS else "transformer", "vae"))
    try:
        return FAMILIES[family].sample_size(denoiser) * FAMILIES[family].pixels_per_latent(vae)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"the configs of {pipeline}'s parts do not say at which size it was trained ({error}); copy it again"
        ) from error


def _configured(pipeline: Path, part: str) -> Any:
    """A part of a pipeline folder as far as its `config` goes."""
    try:
        config = json.loads((pipeline / part / "config.json").read_text(encoding="utf-8"))
        return SimpleNamespace(config=SimpleNamespace(**config))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"the config of {pipeline}'s {part}/ cannot be read ({error}); copy it again") from error
