"""Load the components of a diffusion pipeline, with errors that name a missing part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import diffusers
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_aigc.diffusion.denoiser_channels import channels_of_checkpoint, check_channels
from lightning_aigc.diffusion.families import FAMILIES, TRANSFORMERS, U_NETS
from lightning_aigc.diffusion.saved_schedule import of_single_file
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError

if TYPE_CHECKING:
    from lightning_aigc.diffusion.text_first import StoredTexts

FamilyName = Literal["sd", "sdxl", "sd3", "flux", "flux2", "z_image", "qwen_image"]
PIPELINES: dict[str, Any] = {family.pipeline: name for name, family in FAMILIES.items()}
"""Families by diffusers' name of their pipeline."""
FOLDERS: dict[str, tuple[str, ...]] = {name: family.folders for name, family in FAMILIES.items()}
"""What a pipeline folder of each family holds."""
Part = Literal["texts", "pictures"]
LEFT_OUT: dict[Part, tuple[str, ...]] = {
    "texts": ("transformer", "vae"),
    "pictures": ("text_encoder", "text_encoder_2", "text_encoder_3"),
}
"""What is not loaded with a part of a transformer's pipeline alone."""
DISTILLED = re.compile(r"(?i)(?<![a-z])(turbo|schnell|lightning|hyper|distilled)(?![a-z])")
"""In the names of models that draw in a few steps, which a plain LoRA would undo."""
U_NET_CHECKPOINTS = ("v1", "v2", "xl", "inpainting", "playground", "instruct-pix2pix", "upscale")
"""How diffusers' names of the kinds of single files begin that hold a U-Net, which is what it takes others for."""
ANSWERS_ZEROS = "answers_zeros"
"""In the config of a T5 that is there for diffusers, which loads no folder without one."""
KEY = "model.init_args.pretrained_model_name_or_path"


@dataclass
class Components:
    """The components of a pipeline, all frozen and in eval mode."""

    family: FamilyName
    denoiser: Any
    """The U-Net, or the transformer."""
    vae: Any
    text_encoders: tuple[nn.Module, ...]
    tokenizers: tuple[Any, ...]
    scheduler_config: Mapping[str, Any]
    source: str
    """The folder, file or hub id as the user gave it."""
    stored_texts: StoredTexts | None = None
    """Embeddings in place of text encoders that have left memory."""

    @property
    def denoiser_name(self) -> str:
        """The denoiser's folder and attribute: unet or transformer."""
        return "transformer" if self.family in TRANSFORMERS else "unet"


def check_source(name_or_path: str, families: Sequence[str] = tuple(U_NETS), others: str | None = None) -> None:
    """Check a local folder without reading weights. Raises: ModelError if it is not a pipeline of these families.

    others: a clause for the error, saying what trains other families; unset names a class that trains a LoRA.
    """
    path = resolve(name_or_path)
    if path.is_dir():
        _check_folder(path, families, name_or_path, others)
    elif not path.exists() and name_or_path.startswith((".", "/", "~")):
        raise ModelError(f"{KEY}: the folder or file {name_or_path} does not exist; check the spelling")


def load_components(
    name_or_path: str,
    *,
    families: Sequence[str] = tuple(U_NETS),
    denoiser_dtype: torch.dtype = torch.float32,
    vae_dtype: torch.dtype = torch.float32,
    text_encoder_dtype: torch.dtype | None = None,
    revision: str | None = None,
    variant: str | None = None,
    only: Part | None = None,
) -> Components:
    """Load a diffusers folder, a hub id, a single `.safetensors` checkpoint, or `embedded:sd`.

    only: of a transformer's pipeline, `texts` loads the text encoders alone, `pictures` all but them; what is left out
        is None.

    Raises: ModelError naming the missing or broken part, or a family that is not one of `families`.
    """
    path = resolve(name_or_path)
    dtypes = {"default": text_encoder_dtype or denoiser_dtype, "vae": vae_dtype}  # SDXL's gives NaN in half precision
    dtypes |= dict.fromkeys(("unet", "transformer"), denoiser_dtype)
    try:
        with _quiet_local_loading(path.exists()):
            parts = _load(name_or_path, path, families, dtypes, revision, variant, only)
    except ModelError:
        raise
    except Exception as error:  # diffusers raises anything from OSError to KeyError here
        raise ModelError(_explain(error, name_or_path, path)) from error
    if parts.denoiser is not None:
        check_channels(parts.family, name_or_path, parts.denoiser.config, parts.vae.config)
    for module in filter(None, (parts.denoiser, parts.vae, *parts.text_encoders)):
        module.requires_grad_(False).eval()
    if parts.family in TRANSFORMERS and parts.denoiser is not None:
        TRANSFORMERS[parts.family].prepare(parts.denoiser, parts)
    for encoder in parts.text_encoders:  # transformers may have loaded the dtype of the file
        encoder.to(dtype=dtypes["default"])
    return parts


def _load(
    name_or_path: str,
    path: Path,
    families: Sequence[str],
    dtypes: Mapping[str, torch.dtype],
    revision: str | None,
    variant: str | None,
    only: Part | None,
) -> Components:
    if path.is_file():
        family = family_of_checkpoint(path)
        _check_family(family, families, name_or_path)
        check_channels(family, name_or_path, *channels_of_checkpoint(path))
        pipeline = _load_single_file(path, family, dtypes)
    else:
        pipeline_class: Any = DiffusionPipeline
        extras: dict[str, Any] = dict.fromkeys(LEFT_OUT[only]) if only is not None else {}
        if path.is_dir():
            family = _check_folder(path, families, name_or_path)
            check_channels_of_folder(path, family, name_or_path)
            pipeline_class = getattr(diffusers, _class_name(path, name_or_path))
            known = (*FAMILIES[family].folders, *FAMILIES[family].optional_folders)
            extras = {part: None for part in extras if part in known}
            absent = [part for part in FAMILIES[family].optional_folders if not (path / part).is_dir()]
            extras |= dict.fromkeys(absent + _parts_of_zeros(path, name_or_path))
        if not path.is_dir() or family in U_NETS:
            extras["feature_extractor"] = None
        if not path.is_dir() or family == "sd":
            extras |= {"safety_checker": None, "requires_safety_checker": False}
        pipeline = pipeline_class.from_pretrained(
            str(path) if path.is_dir() else name_or_path,
            revision=revision,
            variant=variant,
            local_files_only=path.is_dir(),
            dtype=dict(dtypes),
            **extras,
        )
        if not path.is_dir():
            family = _family_of(pipeline, name_or_path)
            _check_family(family, families, name_or_path)
            if family in TRANSFORMERS:
                configs = (pipeline.config, getattr(pipeline.transformer, "config", {}), pipeline.scheduler.config)
                check_not_distilled(family, name_or_path, *configs)
    numbers = ("", "_2", "_3")
    encoders = [getattr(pipeline, f"text_encoder{number}", None) for number in numbers]
    tokenizers = [getattr(pipeline, f"tokenizer{number}", None) for number in numbers]
    return Components(
        family=family,
        denoiser=pipeline.unet if family in U_NETS else pipeline.transformer,
        vae=pipeline.vae,
        text_encoders=tuple(e for e in encoders if e is not None),
        tokenizers=tuple(t for t in tokenizers if t is not None),
        scheduler_config=pipeline.scheduler.config,
        source=name_or_path,
    )


@contextlib.contextmanager
def _quiet_local_loading(is_local: bool) -> Iterator[None]:
    """Disable progress bars in a block that loads from disk, which takes seconds; downloads keep theirs."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    enabled = [m for m in (diffusers_logging, transformers_logging) if is_local and m.is_progress_bar_enabled()]
    for module in enabled:
        module.disable_progress_bar()
    try:
        yield
    finally:
        for module in enabled:
            module.enable_progress_bar()


def _check_folder(path: Path, families: Sequence[str], name: str, others: str | None = None) -> FamilyName:
    """The family of a pipeline folder. Raises: ModelError as `check_source` does."""
    family = _family_of_folder(path, name)
    _check_family(family, families, name, others)
    if family in TRANSFORMERS:
        files = ("model_index.json", "transformer/config.json", "scheduler/scheduler_config.json")
        check_not_distilled(family, name, *(_config(path / file, name) for file in files))
    return family


def check_channels_of_folder(path: Path, family: FamilyName, name: str) -> None:
    """Raise ModelError for a folder whose denoiser reads more than noisy latents; reads no weights."""
    parts = ("transformer" if family in TRANSFORMERS else "unet", "vae")
    check_channels(family, name, *(_config(path / part / "config.json", name) for part in parts))


def _parts_of_zeros(path: Path, name: str) -> list[str]:
    """A T5 that answers zeros, and its tokenizer: the pipeline takes zeros without it, and equal tokens run as one."""
    answers_zeros = _config(path / "text_encoder_3" / "config.json", name).get(ANSWERS_ZEROS)
    return ["text_encoder_3", "tokenizer_3"] if answers_zeros else []


def _class_name(path: Path, name: str) -> str:
    """diffusers' name of a folder's pipeline."""
    index = path / "model_index.json"
    if not index.is_file():
        raise ModelError(
            f"{KEY}: {name} has no model_index.json, so it is not a diffusers pipeline folder; point it at the folder"
            " that holds unet/ or transformer/, vae/ and text_encoder/, or at a single .safetensors checkpoint"
        )
    described = _config(index, name)
    if "_class_name" not in described:
        raise ModelError(f"{KEY}: {index} cannot be read ('_class_name'); copy the pipeline folder again")
    return str(described["_class_name"])


def _config(file: Path, name: str) -> dict[str, Any]:
    """A config of a pipeline folder; nothing where there is no file, which loading complains about."""
    try:
        described = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{KEY}: {file} cannot be read ({error}); copy the pipeline folder again") from error
    if not isinstance(described, dict):
        raise ModelError(f"{KEY}: {file} of {name} holds no settings; copy the pipeline folder again")
    return described


def _family_of_folder(path: Path, name: str) -> FamilyName:
    family = _family_of_class(_class_name(path, name), name)
    missing = [part for part in FOLDERS[family] if not (path / part).is_dir()]
    if missing:
        raise ModelError(f"{KEY}: {name} lacks {', '.join(f'{m}/' for m in missing)}; copy the whole pipeline folder")
    return family


def _family_of_class(class_name: str, name: str) -> FamilyName:
    if class_name not in PIPELINES:
        raise ModelError(f"{KEY}: {name} is a {class_name}; known are {', '.join(PIPELINES)}")
    family: FamilyName = PIPELINES[class_name]
    return family


def _family_of(pipeline: Any, name: str) -> FamilyName:
    known = next((found for found in PIPELINES if isinstance(pipeline, getattr(diffusers, found))), None)
    return _family_of_class(known or type(pipeline).__name__, name)


def _check_family(family: FamilyName, families: Sequence[str], name: str, others: str | None = None) -> None:
    """Raise ModelError for a family that a module does not train, and for a distilled transformer."""
    if family not in families:
        of_family = next(pipeline for pipeline, found in PIPELINES.items() if found == family)
        other = others or f"{'StableDiffusionLoRA' if family in U_NETS else 'DiffusionLoRA'} trains yours"
        wanted = " and ".join(pipeline for pipeline, found in PIPELINES.items() if found in families)
        raise ModelError(f"{KEY}: {name} is a {of_family}; this model trains {wanted}, and {other}")
    check_not_distilled(family, name)


def check_not_distilled(family: FamilyName, name: str, *configs: Mapping[str, Any]) -> None:
    """Raise ModelError for a distilled transformer, by its name or the configs of pipeline, transformer, scheduler."""
    if family not in TRANSFORMERS:
        return
    own, short = TRANSFORMERS[family].distilled_name, Path(name).name
    found = DISTILLED.search(short) or (re.search(own, short) if own is not None else None)
    if found is not None:
        raise ModelError(_refuse_distilled(family, name, f"by its name a distilled model ({found[0]})"))
    if configs and TRANSFORMERS[family].is_distilled(*configs):
        raise ModelError(_refuse_distilled(family, name, "by its configuration a distilled model"))


def _refuse_distilled(family: FamilyName, name: str, what: str) -> str:
    return (
        f"{KEY}: {name} is {what}, which draws in a few steps, and a LoRA trained on it undoes that; train on the model"
        f" that it was made from, such as {TRANSFORMERS[family].base}, and use the LoRA with either"
    )


def family_of_checkpoint(path: Path) -> FamilyName:
    """The family of a single-file checkpoint, from its keys. Raises: ModelError for one that holds no U-Net."""
    from diffusers.loaders.single_file_utils import infer_diffusers_model_type, load_single_file_checkpoint

    kind = infer_diffusers_model_type(load_single_file_checkpoint(str(path)))
    if not kind.startswith(U_NET_CHECKPOINTS):
        raise ModelError(
            f"{KEY}: {path} is a checkpoint of {kind}; single files are read of Stable Diffusion 1.x, 2.x and SDXL"
            " alone, so give the pipeline's folder or hub id"
        )
    return "sdxl" if kind.startswith("xl") else "sd"


def _load_single_file(path: Path, family: FamilyName, dtypes: Mapping[str, torch.dtype]) -> Any:
    pipeline_class = StableDiffusionXLPipeline if family == "sdxl" else StableDiffusionPipeline
    pipeline = pipeline_class.from_single_file(str(path), dtype=dtypes["unet"])
    pipeline.vae.to(dtype=dtypes["vae"])
    scheduler = pipeline.scheduler
    pipeline.register_modules(scheduler=scheduler.from_config(scheduler.config, **of_single_file(path)))
    return pipeline


def _explain(error: Exception, name: str, path: Path) -> str:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if path.is_dir():
        return f"{KEY}: {name} is a pipeline folder but one of its parts does not load: {first_line}"
    if path.is_file():
        return f"{KEY}: {name} does not load as a single-file checkpoint: {first_line}"
    return (
        f"{KEY}: {name!r} is neither a folder here nor a model that could be downloaded from the hub ({first_line})."
        " Check the spelling, download it first and give its folder, or use embedded:sd to try without downloads"
    )


def fingerprint(module: nn.Module) -> str:
    """A short hash of a sample of a module's weights, cheap enough to compute at every start.

    Sharded weights count by name and shape: only what is trained is sharded, and nothing that it makes is cached.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            continue
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if not isinstance(parameter, DTensor):
            flat = parameter.detach().flatten()
            digest.update(flat[:: max(1, flat.numel() // 64)][:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:20]
