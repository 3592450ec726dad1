"""Load the components of a Stable Diffusion pipeline, with errors that name a missing part."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import nn

from lightning_aigc.errors import ModelError
from lightning_aigc.tiny.embedded import resolve

Family = Literal["sd", "sdxl"]
PIPELINES: dict[str, tuple[Family, type]] = {
    "StableDiffusionPipeline": ("sd", StableDiffusionPipeline),
    "StableDiffusionXLPipeline": ("sdxl", StableDiffusionXLPipeline),
}
KEY = "model.init_args.pretrained_model_name_or_path"


@dataclass
class Components:
    """The components of a pipeline, all frozen and in eval mode."""

    family: Family
    unet: UNet2DConditionModel
    vae: AutoencoderKL
    text_encoders: tuple[nn.Module, ...]
    tokenizers: tuple[Any, ...]
    scheduler_config: Mapping[str, Any]
    source: str
    """The folder, file or hub id as the user gave it."""

    @property
    def pipeline_class(self) -> Any:
        return StableDiffusionXLPipeline if self.family == "sdxl" else StableDiffusionPipeline


def check_source(name_or_path: str) -> None:
    """Check a local folder without reading weights. Raises: ModelError if it is not a pipeline."""
    path = resolve(name_or_path)
    if path.is_dir():
        _pipeline_class(path, name_or_path)
    elif not path.exists() and name_or_path.startswith((".", "/", "~")):
        raise ModelError(f"{KEY}: the folder or file {name_or_path} does not exist; check the spelling")


def load_components(
    name_or_path: str,
    *,
    unet_dtype: torch.dtype = torch.float32,
    vae_dtype: torch.dtype = torch.float32,
    text_encoder_dtype: torch.dtype | None = None,
    revision: str | None = None,
    variant: str | None = None,
) -> Components:
    """Load a diffusers folder, a hub id, a single `.safetensors` checkpoint, or `embedded:sd`.

    Raises: ModelError naming the missing or broken part.
    """
    path = resolve(name_or_path)
    try:
        with _quiet_local_loading(path.exists()):
            return _load(name_or_path, path, unet_dtype, vae_dtype, text_encoder_dtype or unet_dtype, revision, variant)
    except ModelError:
        raise
    except Exception as error:  # diffusers raises anything from OSError to KeyError here
        raise ModelError(_explain(error, name_or_path, path)) from error


def _load(
    name_or_path: str,
    path: Path,
    unet_dtype: torch.dtype,
    vae_dtype: torch.dtype,
    text_encoder_dtype: torch.dtype,
    revision: str | None,
    variant: str | None,
) -> Components:
    pipeline_class: Any = DiffusionPipeline
    family: Family | None = None
    if path.is_file():
        family, pipeline = _load_single_file(path, unet_dtype, vae_dtype)
    else:
        if path.is_dir():
            family, pipeline_class = _pipeline_class(path, name_or_path)
        # SDXL's autoencoder gives NaN in half precision, so it has a separate dtype.
        dtypes = {"default": text_encoder_dtype, "unet": unet_dtype, "vae": vae_dtype}
        extras: dict[str, Any] = {} if family == "sdxl" else {"safety_checker": None, "requires_safety_checker": False}
        pipeline = pipeline_class.from_pretrained(
            str(path) if path.is_dir() else name_or_path,
            revision=revision,
            variant=variant,
            local_files_only=path.is_dir(),
            dtype=dtypes,
            feature_extractor=None,
            **extras,
        )
        family = family or _family_of(pipeline, name_or_path)

    encoders = [pipeline.text_encoder, getattr(pipeline, "text_encoder_2", None)]
    tokenizers = [pipeline.tokenizer, getattr(pipeline, "tokenizer_2", None)]
    parts = Components(
        family=family,
        unet=pipeline.unet,
        vae=pipeline.vae,
        text_encoders=tuple(e for e in encoders if e is not None),
        tokenizers=tuple(t for t in tokenizers if t is not None),
        scheduler_config=pipeline.scheduler.config,
        source=name_or_path,
    )
    for module in (parts.unet, parts.vae, *parts.text_encoders):
        module.requires_grad_(False).eval()
    for encoder in parts.text_encoders:  # transformers may have loaded the dtype of the file
        encoder.to(dtype=text_encoder_dtype)
    return parts


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


def _pipeline_class(path: Path, name: str) -> tuple[Family, type]:
    index = path / "model_index.json"
    if not index.is_file():
        raise ModelError(
            f"{KEY}: {name} has no model_index.json, so it is not a diffusers pipeline folder; point it at the folder"
            " that holds unet/, vae/ and text_encoder/, or at a single .safetensors checkpoint"
        )
    try:
        described = json.loads(index.read_text(encoding="utf-8"))
        class_name = described["_class_name"]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ModelError(f"{KEY}: {index} cannot be read ({error}); copy the pipeline folder again") from error
    if class_name not in PIPELINES:
        raise ModelError(f"{KEY}: {name} is a {class_name}; this model trains {' and '.join(PIPELINES)}")
    needed = ["unet", "vae", "text_encoder", "tokenizer", "scheduler"]
    if class_name == "StableDiffusionXLPipeline":
        needed += ["text_encoder_2", "tokenizer_2"]
    missing = [part for part in needed if not (path / part).is_dir()]
    if missing:
        raise ModelError(f"{KEY}: {name} lacks {', '.join(f'{m}/' for m in missing)}; copy the whole pipeline folder")
    return PIPELINES[class_name]


def _family_of(pipeline: Any, name: str) -> Family:
    for family, pipeline_class in PIPELINES.values():
        if isinstance(pipeline, pipeline_class):
            return family
    raise ModelError(f"{KEY}: {name} is a {type(pipeline).__name__}; this model trains {' and '.join(PIPELINES)}")


def family_of_checkpoint(path: Path) -> Family:
    """The family of a single-file checkpoint, from its keys."""
    from diffusers.loaders.single_file_utils import infer_diffusers_model_type, load_single_file_checkpoint

    return "sdxl" if infer_diffusers_model_type(load_single_file_checkpoint(str(path))).startswith("xl") else "sd"


def _load_single_file(path: Path, dtype: torch.dtype, vae_dtype: torch.dtype) -> tuple[Family, Any]:
    family = family_of_checkpoint(path)
    pipeline_class = StableDiffusionXLPipeline if family == "sdxl" else StableDiffusionPipeline
    pipeline = pipeline_class.from_single_file(str(path), dtype=dtype)
    pipeline.vae.to(dtype=vae_dtype)
    return family, pipeline


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
    """A short hash of a sample of a module's weights, cheap enough to compute at every start."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if "lora_" not in name:
            flat = parameter.detach().flatten()
            picked = flat[:: max(1, flat.numel() // 64)][:64].float().cpu()
            digest.update(f"{name}{tuple(parameter.shape)}".encode() + picked.numpy().tobytes())
    return digest.hexdigest()[:20]
