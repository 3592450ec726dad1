"""Load the components of a diffusion pipeline, with errors that name a missing part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_aigc.diffusion.families import FAMILIES, SHORT, Components, Family
from lightning_aigc.diffusion.pipeline.denoiser_file import load_denoiser_file
from lightning_aigc.diffusion.pipeline.image_sizes import channels_of_checkpoint, check_channels
from lightning_aigc.diffusion.pipeline.single_file import KEY, family_of_checkpoint, load_single_file, missing_weights
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError

PIPELINES: dict[str, Family] = {family.pipeline: family for family in FAMILIES.values()}
"""Families by diffusers' name of their pipeline."""
PipelineHalf = Literal["text_encoders", "without_text_encoders"]
EXCLUDED_FOLDERS: dict[PipelineHalf, tuple[str, ...]] = {
    "text_encoders": ("transformer", "vae"),
    "without_text_encoders": ("text_encoder", "text_encoder_2", "text_encoder_3"),
}
"""Folders that are not loaded, by the half of a transformer's pipeline that is."""
ANSWERS_ZEROS = "answers_zeros"
"""Config entry of a T5 with zero output, which exists because diffusers loads no folder without a T5."""
UNUSED_HEADS = ("lm_head.", "pooler.", "logit_scale", "visual_projection.")
"""Weights of a text encoder's checkpoint that no prompt embedding depends on."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_source(
    name_or_path: str, families: Mapping[str, Family], hint: str = "", *, takes_distilled: bool = False
) -> Family | None:
    """Check a local folder or file name without reading weights; returns the family of a folder.

    Args:
        families: The families that can be trained.
        hint: A clause for the error that says what to do about another family.
        takes_distilled: Whether a few-step model is taken.

    Raises: ModelError for a path that does not exist, or a folder that is not a pipeline of these families.
    """
    path = resolve(name_or_path)
    if path.is_dir():
        return _family_of_folder(path, families, name_or_path, hint, takes_distilled)
    if not path.exists() and name_or_path.startswith((".", "/", "~")):
        raise ModelError(f"{KEY}: the folder or file {name_or_path} does not exist; check the spelling")
    return None


def find_family(
    name_or_path: str,
    families: Mapping[str, Family] = FAMILIES,
    revision: str | None = None,
    hint: str = "",
    *,
    takes_distilled: bool = False,
) -> Family:
    """The family of a pipeline folder, a single file or a hub id, of which `model_index.json` is downloaded.

    Raises: ModelError for a model that cannot be read, or of a family that is not one of `families`.
    """
    path = resolve(name_or_path)
    if path.is_dir():
        return _family_of_folder(path, families, name_or_path, hint, takes_distilled)
    try:
        if path.is_file():
            family = family_of_checkpoint(path)
        else:
            config = diffusers.DiffusionPipeline.load_config(name_or_path, revision=revision)
            family = _family_of_class(str(config["_class_name"]), name_or_path)
    except ModelError:
        raise
    except Exception as error:  # diffusers and the hub raise anything from OSError to KeyError here
        raise ModelError(_explain(error, name_or_path, path)) from error
    _check_family(family, families, name_or_path, hint, takes_distilled)
    return family


def load_components(
    name_or_path: str,
    *,
    families: Mapping[str, Family] = FAMILIES,
    denoiser_dtype: torch.dtype = torch.float32,
    vae_dtype: torch.dtype = torch.float32,
    text_encoder_dtype: torch.dtype | None = None,
    revision: str | None = None,
    variant: str | None = None,
    only: PipelineHalf | None = None,
    takes_distilled: bool = False,
    denoiser_file: str | None = None,
) -> Components:
    """Load a diffusers folder, a hub id, a single `.safetensors` checkpoint, or `embedded:sd`.

    Args:
        families: The families that can be trained.
        text_encoder_dtype: Unset is `denoiser_dtype`.
        only: Half of a transformer's pipeline to load; the other components are None.
        takes_distilled: Whether a few-step model is taken.
        denoiser_file: A file with the transformer's weights, instead of the pipeline's own.

    Raises: ModelError with the name of the missing or broken component, or of a family that cannot be trained.
    """
    path = resolve(name_or_path)
    family = find_family(name_or_path, families, revision, takes_distilled=takes_distilled)
    dtypes = {"default": text_encoder_dtype or denoiser_dtype, "vae": vae_dtype}  # SDXL's gives NaN in half precision
    dtypes |= dict.fromkeys(("unet", "transformer"), denoiser_dtype)
    try:
        with quiet_local_loading(path.exists()), no_missing_weights(name_or_path):
            components = _load(
                name_or_path, path, family, dtypes, revision, variant, only, takes_distilled, denoiser_file
            )
    except ModelError:
        raise
    except Exception as error:  # diffusers raises anything from OSError to KeyError here
        raise ModelError(_explain(error, name_or_path, path)) from error
    if components.denoiser is not None:
        check_channels(family, name_or_path, components.denoiser.config, components.vae.config)
    for module in filter(None, (components.denoiser, components.vae, *components.text_encoders)):
        module.requires_grad_(False).eval()
    if components.denoiser is not None:
        family.prepare(components.denoiser, components)
    for encoder in components.text_encoders:  # transformers may have loaded the dtype of the file
        encoder.to(dtype=dtypes["default"])
    return components


def _load(
    name_or_path: str,
    path: Path,
    family: Family,
    dtypes: Mapping[str, torch.dtype],
    revision: str | None,
    variant: str | None,
    only: PipelineHalf | None,
    takes_distilled: bool,
    denoiser_file: str | None,
) -> Components:
    if path.is_file():
        check_channels(family, name_or_path, *channels_of_checkpoint(path))
        pipeline = load_single_file(path, dtypes)
    else:
        known = (*family.folders, *family.optional_folders)
        left_out = () if only is None else EXCLUDED_FOLDERS[only]
        extras: dict[str, Any] = dict.fromkeys(each for each in left_out if each in known)
        pipeline_class: Any = diffusers.DiffusionPipeline
        if path.is_dir():
            check_channels_of_folder(path, family, name_or_path)
            pipeline_class = getattr(diffusers, family.pipeline)
            absent = [name for name in family.optional_folders if not (path / name).is_dir()]
            extras |= dict.fromkeys(absent + _zero_encoders(path, name_or_path))
        if denoiser_file is not None and only != "text_encoders":
            source = str(path) if path.is_dir() else name_or_path
            extras["transformer"] = load_denoiser_file(denoiser_file, family, source, revision, dtypes["transformer"])
        if not path.is_dir() or not family.is_flow:
            extras["feature_extractor"] = None
        if not path.is_dir() or family.name == "sd":
            extras |= {"safety_checker": None, "requires_safety_checker": False}
        pipeline = pipeline_class.from_pretrained(
            str(path) if path.is_dir() else name_or_path,
            revision=revision,
            variant=variant,
            local_files_only=path.is_dir(),
            dtype=dict(dtypes),
            **extras,
        )
        if not path.is_dir() and family.is_flow and not takes_distilled:
            configs = (pipeline.config, getattr(pipeline.transformer, "config", {}), pipeline.scheduler.config)
            check_not_distilled(family, name_or_path, *configs)
    numbers = ("", "_2", "_3")
    encoders = [getattr(pipeline, f"text_encoder{number}", None) for number in numbers]
    tokenizers = [getattr(pipeline, f"tokenizer{number}", None) for number in numbers]
    return Components(
        family=family,
        denoiser=getattr(pipeline, family.denoiser_name),
        vae=pipeline.vae,
        text_encoders=tuple(e for e in encoders if e is not None),
        tokenizers=tuple(t for t in tokenizers if t is not None),
        scheduler_config=pipeline.scheduler.config,
        pipeline_options={name: pipeline.config[name] for name in family.pipeline_options},
        processor=getattr(pipeline, "processor", None),
        source=name_or_path,
        zeros_for_empty=bool(pipeline.config.get("force_zeros_for_empty_prompt", False)),
    )


@contextlib.contextmanager
def quiet_local_loading(is_local: bool) -> Iterator[None]:
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


@contextlib.contextmanager
def no_missing_weights(name: str, key: str = KEY) -> Iterator[None]:
    """Raise ModelError after a block that loads networks, if files lacked weights of theirs.

    transformers draws such weights at random, diffusers leaves them without memory, and both only log that.
    """
    found = _MissingWeights()
    loggers = [logging.getLogger(library) for library in ("diffusers", "transformers")]
    for logger in loggers:
        logger.addHandler(found)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(found)
    if found.names:
        raise ModelError(missing_weights(name, found.names, key))


class _MissingWeights(logging.Handler):
    """Names of the weights that diffusers and transformers log as newly initialized, other than unused heads."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        names = re.findall(r"^(.+?) *\|[^|\n]*MISSING", said, re.MULTILINE)  # transformers 5
        listed = re.search(r"newly initialized: \[(.*?)\]", said)
        names += re.findall(r"'([^']+)'", listed[1]) if listed else []
        folder = re.search(r"(?: from: | checkpoint at )(.+?)(?: and are newly |$)", said, re.MULTILINE)
        of = f" of {Path(folder[1]).name}" if folder else ""
        self.names += [f"{each}{of}" for each in names if not each.startswith(UNUSED_HEADS)]


def _family_of_folder(
    path: Path, families: Mapping[str, Family], name: str, hint: str = "", takes_distilled: bool = False
) -> Family:
    family = _family_of_class(_class_name(path, name), name)
    missing = [folder for folder in family.folders if not (path / folder).is_dir()]
    if missing:
        raise ModelError(f"{KEY}: {name} lacks {', '.join(f'{m}/' for m in missing)}; copy the whole pipeline folder")
    _check_family(family, families, name, hint, takes_distilled)
    if family.is_flow and not takes_distilled:
        files = ("model_index.json", "transformer/config.json", "scheduler/scheduler_config.json")
        check_not_distilled(family, name, *(_config(path / file, name) for file in files))
    return family


def check_channels_of_folder(path: Path, family: Family, name: str) -> None:
    """Raise ModelError for a folder whose denoiser reads more than noisy latents; reads no weights."""
    configs = (_config(path / folder / "config.json", name) for folder in (family.denoiser_name, "vae"))
    check_channels(family, name, *configs)


def _zero_encoders(path: Path, name: str) -> list[str]:
    """A T5 with zero output, and its tokenizer: the pipeline uses zeros without it, and equal tokens run as one."""
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


def _family_of_class(class_name: str, name: str) -> Family:
    if class_name not in PIPELINES:
        raise ModelError(f"{KEY}: {name} is a {class_name}; known are {', '.join(PIPELINES)}")
    return PIPELINES[class_name]


def _check_family(
    family: Family, families: Mapping[str, Family], name: str, hint: str = "", takes_distilled: bool = False
) -> None:
    """Raise ModelError for a family that a method does not train, and for a distilled transformer."""
    if family.name not in families:
        wanted = " and ".join(known.pipeline for known in families.values())
        raise ModelError(f"{KEY}: {name} is a {family.pipeline}; this model trains {wanted}{hint and f', and {hint}'}")
    if not takes_distilled:
        check_not_distilled(family, name)


def check_not_distilled(family: Family, name: str, *configs: Mapping[str, Any], key: str = KEY) -> None:
    """Raise ModelError for a few-step model, by its name or the configs of pipeline, transformer and scheduler."""
    reason = family.distilled_reason(Path(name).name, configs)
    if reason is not None:
        adapters = family.training_adapters
        known = f", such as one of https://huggingface.co/{adapters}" if adapters else ""
        raise ModelError(
            f"{key}: {name} is {reason}, which draws in a few steps, and a LoRA trained on it undoes that; train on the"
            f" model that it was made from, such as {family.base}, and use the LoRA with either, or set"
            f" model.init_args.training_adapter to the file of a training adapter for it{known}"
        )


def _explain(error: Exception, name: str, path: Path) -> str:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if path.is_dir():
        return f"{KEY}: {name} is a pipeline folder but one of its parts does not load: {first_line}"
    if path.is_file() and _hub_reason(error, name):
        return (
            f"{KEY}: {name} is a single file, whose configs come from the hub, and they could not be read; give the"
            " model's diffusers folder, or load the file once with the hub, so that its cache has them"
        )
    if path.is_file() and "shape" in first_line:
        return (
            f"{KEY}: {name} is a single file with weights of other sizes than the published models have"
            f" ({first_line.split('. ')[0]}); give the model's diffusers folder, which has its configs"
        )
    if path.is_file() and "meta tensor" in first_line:  # of a network some of whose weights diffusers did not find
        return missing_weights(name, ["weights of the U-Net or the VAE"])
    absent = re.search(r"Failed to load (\w+)\. Weights for|contain a valid CLIP (model)", first_line)
    if path.is_file() and absent:
        return (
            f"{KEY}: {name} has no {absent[1] or 'text encoder'}; give a checkpoint with U-Net, VAE and text encoders,"
            " or the pipeline's folder"
        )
    if path.is_file():
        return f"{KEY}: {name} does not load as a single-file checkpoint: {first_line}"
    if not HUB_ID.fullmatch(name):
        return (
            f"{KEY}: there is no folder or file {name!r}, and a model of the hub is named like owner/name; check the"
            f" spelling, take one of {', '.join(SHORT)}, or embedded:sd, which needs no download"
        )
    return (
        f"{KEY}: {name!r} is neither a folder here nor a model that could be downloaded from the hub:"
        f" {_hub_reason(error, name) or first_line}; embedded:sd needs no download"
    )


def _hub_reason(error: BaseException, name: str) -> str | None:
    """The reason of a failed download and what to do, from the hub's own error in the chain; None without one."""
    from huggingface_hub import errors, is_offline_mode

    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    unreachable = "HF_HUB_OFFLINE=1 forbids the download" if is_offline_mode() else "the hub does not answer"
    reasons: list[tuple[tuple[type[BaseException], ...], str]] = [
        ((errors.GatedRepoError,), f"accept its terms at https://huggingface.co/{name}, then run: hf auth login"),
        (
            (errors.RepositoryNotFoundError,),
            "it has no model of this name; check the spelling, or for a private model run: hf auth login",
        ),
        ((errors.RevisionNotFoundError,), "it has no such revision; set model.init_args.revision to one that it has"),
        (
            (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError),
            f"it is not in the hub's cache, and {unreachable}; where there is a network, run: hf download {name}",
        ),
        ((errors.EntryNotFoundError,), "it has no model_index.json, so it is no diffusers pipeline; name one"),
    ]
    return next((said for kinds, said in reasons if any(isinstance(each, kinds) for each in chain)), None)


def fingerprint(module: nn.Module) -> str:
    """A short hash of a sample of a module's weights, cheap enough to compute at every start.

    Sharded weights count by name and shape: only what is trained is sharded, and nothing that it makes is cached.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if "lora_" in name or "lokr_" in name:
            continue
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if not isinstance(parameter, DTensor):
            flat = parameter.detach().flatten()
            digest.update(flat[:: max(1, flat.numel() // 64)][:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:20]
