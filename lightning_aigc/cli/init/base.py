"""The base model that a config is written for: where it is, its family and its images' side."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors

from lightning_aigc.diffusion.families import FAMILIES, SHORT, TRANSFORMERS, Family
from lightning_aigc.diffusion.pipeline.denoiser_file import KEY as DENOISER_FILE
from lightning_aigc.diffusion.pipeline.denoiser_file import check_denoiser_file
from lightning_aigc.diffusion.pipeline.loading import (
    HUB_ID,
    check_channels_of_folder,
    check_not_distilled,
    check_source,
)
from lightning_aigc.diffusion.pipeline.single_file import family_of_checkpoint
from lightning_aigc.embedded import PREFIX, resolve
from lightning_aigc.errors import ConfigError, ModelError


@dataclass(frozen=True)
class Base:
    """A base model: where it is, its family, and the side in pixels that it was trained at."""

    source: str
    family: Family
    side: int
    reason: str
    """Source of the family's name."""
    denoiser_file: str | None = None
    """The file with the denoiser's weights, where it is not the pipeline's own."""
    is_float8: bool = False
    """Whether that file keeps weights in float8."""


def find_base(given: str, denoiser_file: str | None = None) -> Base:
    """The base for a name in `SHORT`, a pipeline folder, a checkpoint file, a hub id or `embedded:sd`.

    Args:
        given: `--base`. For the file of a transformer alone, its family's pipeline is taken from the hub.
        denoiser_file: `--denoiser_file`, with the transformer's weights.

    Raises: ConfigError or ModelError for a path that is no model, or a model that is distilled or of no known family.
    """
    path = resolve(given)
    names = _layers_of(path)
    if any(re.search("lora|lokr|hada", name) for name in names):
        raise ConfigError(
            f"--base {given} is a LoRA file, and a base is a model; give the model that it was trained on, and to"
            f" continue the LoRA set model.init_args.lora_from: {given}"
        )
    is_transformer = bool(names) and not any(re.search(r"(^|\.)(input_blocks|down_blocks)\.", name) for name in names)
    if denoiser_file is None and is_transformer:
        denoiser_file, family = given, _family_of_file_name(given)
        base = Base(family.base, family, family.native_side, "the other components of the pipeline")
    else:
        base = _find_pipeline(given)
    if denoiser_file is None:
        return base
    if not base.family.is_flow:
        raise ConfigError(
            f"--denoiser_file is for transformers, and {base.family.title}'s files hold all of its pipeline; give it as"
            f" the base: --base {denoiser_file}"
        )
    check_denoiser_file(denoiser_file, base.family)
    check_not_distilled(base.family, denoiser_file, key=DENOISER_FILE)
    is_float8 = any(dtype.startswith("F8_E") for dtype in _layers_of(Path(denoiser_file).expanduser()).values())
    return replace(base, denoiser_file=denoiser_file, is_float8=is_float8)


def _find_pipeline(given: str) -> Base:
    if given in SHORT:
        family = SHORT[given]
        return Base(family.base, family, family.native_side, f"--base {given}")
    found, path = check_source(given, FAMILIES), resolve(given)
    if found is not None:
        family = found
        base = Base(given, family, _side_of(path, family), f"a {family.pipeline} folder")
        check_channels_of_folder(path, family, given)
        return base
    if path.is_file():
        family = _family_of_file(given, path)
        return Base(given, family, family.native_side, "read from the checkpoint")
    if not HUB_ID.fullmatch(given):
        raise ConfigError(f"--base {given} is no folder, no file and no hub id; use {', '.join(SHORT)} or a path")
    family = _family_of_name(given)
    check_not_distilled(family, given)
    return Base(given, family, family.native_side, f"guessed from the name: {family.title}")


def _layers_of(path: Path) -> dict[str, str]:
    """Names and dtypes in a safetensors file; none of anything else, or of a file whose error comes when it is read."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - it has no __iter__
    except (OSError, ValueError, safetensors.SafetensorError):
        return {}


def family_named(name: str, families: Mapping[str, Family]) -> Family | None:
    """The family of these that a name tells; None where it tells none."""
    known = (f for f in families.values() if f.name_pattern and re.search(f.name_pattern, name.casefold()))
    return next(known, None)


def _family_of_file_name(given: str) -> Family:
    """The family of transformers that a file's name tells. Raises: ConfigError for a name that tells none."""
    found = family_named(Path(given).stem, TRANSFORMERS)
    if found is None:
        short = ", ".join(key for key, family in SHORT.items() if family.is_flow)
        raise ConfigError(
            f"--base {given} is the file of a transformer, and its name does not tell which; give its model as --base"
            f" too, one of {short}: --base flux --denoiser_file {given}"
        )
    return found


def _family_of_file(given: str, path: Path) -> Family:
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


def _family_of_name(given: str) -> Family:
    """The family that a hub id's name tells, else Stable Diffusion 1.5's.

    Raises: ConfigError for a FLUX.2 whose name does not tell which.
    """
    found = family_named(given, FAMILIES)
    if found is None and "flux" in given.casefold():
        raise ConfigError(
            f"--base {given} is a FLUX.2 that is named neither klein nor dev, which differ; use"
            f" {FAMILIES['flux2'].base} or {FAMILIES['flux2_dev'].base}, or download it and give its folder"
        )
    return found or FAMILIES["sd"]


def is_embedded(base: Base) -> bool:
    return base.source.startswith(PREFIX)


def _side_of(pipeline: Path, family: Family) -> int:
    """The side of the images that a pipeline folder was made for: latents times the autoencoder's step.

    Raises: ModelError for configs that cannot be read, or do not say it.
    """
    denoiser, vae = (_configured(pipeline, folder) for folder in (family.denoiser_name, "vae"))
    try:
        return family.sample_size(denoiser) * family.pixels_per_latent(vae)
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
