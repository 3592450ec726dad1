"""LoRAMetadata: the header entries of a LoRA file, sd-scripts' `ss_*` and Stability's `modelspec.*`.

A1111, ComfyUI and CivitAI show them; all values are strings, as safetensors requires.
Source: kohya-ss/sd-scripts train_network.py and library/sai_model_spec.py, ModelSpec 1.0.1.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from torch import Tensor

from lightning_aigc.atomic_file import atomic_file
from lightning_aigc.diffusion.families import FAMILIES, TRANSFORMERS
from lightning_aigc.diffusion.pipeline.saved_schedule import SCHEDULER_KEY, header_of
from lightning_aigc.errors import ModelError

BASE_MODELS = {name: pattern for family in FAMILIES.values() for name, pattern in family.header_patterns.items()}
"""Base models of LoRA files, with the pattern of their headers."""


@dataclass(frozen=True)
class LoRAMetadata:
    """Facts of a training run for the header of its LoRA file; every field is optional."""

    title: str | None = None
    """Display name; `output_name` if None."""
    output_name: str | None = None
    """File name without its suffix."""
    description: str | None = None
    author: str | None = None
    license: str | None = None
    trigger_phrase: str | None = None
    """The trigger word to use in prompts."""
    base_model: str | None = None
    """Family of the base model; inferred from the U-Net if None."""
    base_model_name: str | None = None
    """Hub id or folder name of the base model."""
    base_model_hash: str | None = None
    """sha256 of the base weights in hex, as `hash_base_model` returns."""
    prediction_type: Literal["epsilon", "v_prediction"] | None = "epsilon"
    """Prediction type of the U-Net; None for flow matching."""
    scheduler: str | None = None
    """Config of the scheduler that the run draws with, as JSON; merging gives it to the pipeline."""
    resolution: int | tuple[int, int] | None = None
    """Training size in pixels: one side, or (width, height)."""
    num_train_images: int | None = None
    num_reg_images: int | None = None
    """Images of prior preservation."""
    steps: int | None = None
    """Optimizer steps taken."""
    num_epochs: int | None = None
    train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    learning_rate: float | None = None
    text_encoder_lr: float | None = None
    optimizer: str | None = None
    lr_scheduler: str | None = None
    mixed_precision: str | None = None
    seed: int | None = None
    snr_gamma: float | None = None
    noise_offset: float | None = None
    captions: tuple[str, ...] = ()
    """Training captions; counted by comma-separated tag into `ss_tag_frequency`."""
    started_at: float | None = None
    """Seconds since the epoch."""
    finished_at: float | None = None
    """Seconds since the epoch."""
    date: str | None = None
    """ISO 8601 date of the file; now if None. With a fixed date, equal inputs give equal files."""
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Verbatim header entries, which override all others."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> LoRAMetadata:
        """Build from field names; `ss_*`, `modelspec.*` and other dotted keys become `extra`.

        Raises: ModelError for any other name, listing the fields.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        extra = {key: str(value) for key, value in values.items() if key.startswith(("ss_", "sshs_")) or "." in key}
        fields = {key: value for key, value in values.items() if key not in extra}
        if unknown := sorted(set(fields) - names):
            raise ModelError(
                f"got LoRA metadata {unknown}; wanted one of {sorted(names)}, or a key starting with ss_ or modelspec."
            )
        fields["captions"] = tuple(fields.get("captions", ()))
        return cls(**{**fields, "extra": {**extra, **fields.get("extra", {})}})

    def to_header(self, *, base_model: str, rank: int, alpha: float, network_args: Mapping[str, str]) -> dict[str, str]:
        """All header entries except the hashes of the tensors, which `serialize` adds."""
        is_v = self.prediction_type == "v_prediction"
        size = _width_and_height(self.resolution, base_model, is_v)
        network = {
            "ss_network_module": "networks.lora",
            "ss_network_dim": rank,
            "ss_network_alpha": f"{alpha:.9g}",
            "ss_network_args": json.dumps(dict(network_args), sort_keys=True) if network_args else None,
        }
        entries = (
            network | self._training_entries(base_model, is_v, size) | self._modelspec_entries(base_model, is_v, size)
        )
        if self.scheduler is not None:
            entries |= {**header_of(json.loads(self.scheduler)), SCHEDULER_KEY: self.scheduler}
        return {key: str(value) for key, value in entries.items() if value is not None} | dict(self.extra)

    def _training_entries(self, base_model: str, is_v: bool, size: tuple[int, int]) -> dict[str, Any]:
        """sd-scripts' `ss_` entries."""
        versions = {"sd1": "sd_v1", "sd2": "sd_v2_v" if is_v else "sd_v2", "sdxl": "sdxl_base_v1-0"}
        return {
            "ss_base_model_version": versions.get(base_model, base_model),
            "ss_v2": base_model == "sd2",
            "ss_output_name": self.output_name,
            "ss_sd_model_name": self.base_model_name,
            "ss_sd_model_hash": self.base_model_hash[:10] if self.base_model_hash else None,
            "ss_new_sd_model_hash": self.base_model_hash,
            "ss_resolution": f"({size[0]}, {size[1]})" if self.resolution is not None else None,
            "ss_num_train_images": self.num_train_images,
            "ss_num_reg_images": self.num_reg_images,
            "ss_steps": self.steps,
            "ss_max_train_steps": self.steps,
            "ss_num_epochs": self.num_epochs,
            "ss_total_batch_size": self.train_batch_size,
            "ss_gradient_accumulation_steps": self.gradient_accumulation_steps,
            "ss_learning_rate": self.learning_rate,
            "ss_unet_lr": self.learning_rate,
            "ss_text_encoder_lr": self.text_encoder_lr,
            "ss_optimizer": self.optimizer,
            "ss_lr_scheduler": self.lr_scheduler,
            "ss_mixed_precision": self.mixed_precision,
            "ss_seed": self.seed,
            "ss_min_snr_gamma": self.snr_gamma,
            "ss_noise_offset": self.noise_offset,
            "ss_training_comment": self.description,
            "ss_training_started_at": self.started_at,
            "ss_training_finished_at": self.finished_at,
            "ss_tag_frequency": json.dumps({"captions": count_tags(self.captions)}) if self.captions else None,
        }

    def _modelspec_entries(self, base_model: str, is_v: bool, size: tuple[int, int]) -> dict[str, Any]:
        """Stability AI's `modelspec.` entries."""
        date = self.date or datetime.datetime.now().replace(microsecond=0).isoformat()
        return {
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.architecture": architecture(base_model, is_v),
            # As in sd-scripts, whose SDXL keys are those of generative-models.
            "modelspec.implementation": "https://github.com/Stability-AI/generative-models"
            if base_model == "sdxl"
            else "diffusers",
            "modelspec.title": self.title or self.output_name or "LoRA",
            "modelspec.description": self.description,
            "modelspec.author": self.author,
            "modelspec.license": self.license,
            "modelspec.trigger_phrase": self.trigger_phrase,
            "modelspec.usage_hint": f"Use the word {self.trigger_phrase!r} in the prompt"
            if self.trigger_phrase
            else None,
            "modelspec.prediction_type": {"v_prediction": "v"}.get(self.prediction_type or "", self.prediction_type),
            "modelspec.resolution": f"{size[0]}x{size[1]}",
            "modelspec.date": date,
        }


def architecture(base_model: str, is_v_prediction: bool) -> str:
    """The ModelSpec architecture id of a LoRA."""
    version_2 = "stable-diffusion-v2-768-v" if is_v_prediction else "stable-diffusion-v2-512"
    names = {"sd1": "stable-diffusion-v1", "sd2": version_2, "sdxl": "stable-diffusion-xl-v1-base"}
    names |= {name: family.modelspec for name, family in TRANSFORMERS.items()}
    return f"{names[base_model]}/lora"


def count_tags(captions: tuple[str, ...]) -> dict[str, int]:
    """The frequency of each comma-separated tag, most frequent first, as A1111 shows it."""
    tags = Counter(tag.strip() for caption in captions for tag in caption.split(",") if tag.strip())
    return dict(sorted(tags.items(), key=lambda item: (-item[1], item[0])))


def hash_base_model(path: str | Path) -> str | None:
    """sha256 in hex of a checkpoint file or of a pipeline folder's denoiser; None without weights."""
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.glob("*/diffusion_pytorch_model*.safetensors"))
    files = [file for file in files if file == path or file.parent.name in ("unet", "transformer")]
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _width_and_height(resolution: int | tuple[int, int] | None, base_model: str, is_v: bool) -> tuple[int, int]:
    if resolution is None:
        resolution = {"sd1": 512, "sd2": 768 if is_v else 512}.get(base_model, 1024)
    return (resolution, resolution) if isinstance(resolution, int) else (resolution[0], resolution[1])


HASH_KEYS = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")


def serialize(state: Mapping[str, Tensor], header: Mapping[str, str]) -> bytes:
    """The bytes of the file with its hashes in the header, equal for equal input.

    safetensors writes metadata in an order that varies between runs, so the header is built here.
    """
    plain = safetensors.torch.save({key: value.detach().cpu().contiguous() for key, value in state.items()})
    length = int.from_bytes(plain[:8], "little")
    entries, tensors = json.loads(plain[8 : 8 + length]), plain[8 + length :]

    def assemble(metadata: Mapping[str, str]) -> bytes:
        ordered = {"__metadata__": dict(sorted(metadata.items())), **entries}
        text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + tensors

    digest = hashlib.sha256(tensors).hexdigest()
    # sd-webui-additional-networks' old hash: the 64 KiB at 1 MiB of a file with only the ss_ entries.
    legacy = assemble({key: value for key, value in header.items() if key.startswith("ss_")})[0x100000:0x110000]
    hashes = (digest, hashlib.sha256(legacy).hexdigest()[:8], f"0x{digest}")
    return assemble({**header, **dict(zip(HASH_KEYS, hashes, strict=True))})


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file, then rename it to `path`. Raises: ModelError naming the path if it cannot be written."""
    try:
        with atomic_file(path) as stream:
            stream.write(content)
    except OSError as error:
        raise ModelError(
            f"cannot write {path} ({len(content) / 2**20:.1f} MiB): {error.strerror or error}; "
            "free some space or choose another folder"
        ) from error
