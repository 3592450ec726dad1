"""Contents of a hub folder: the trained files of a run, images that it drew, its record and its config."""

from __future__ import annotations

import base64
import binascii
import io
import itertools
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors
import yaml
from PIL import Image

from lightning_aigc.atomic_file import write_text
from lightning_aigc.diffusion.families import FAMILIES, Family
from lightning_aigc.diffusion.lora.base_model import named_base_model
from lightning_aigc.diffusion.lora.file import LOKR_MODULE, convert, read_lora
from lightning_aigc.diffusion.lora.lycoris import unread_by_diffusers
from lightning_aigc.diffusion.lora.metadata import HASH_KEYS, serialize, write_atomically
from lightning_aigc.diffusion.lora.names import UNET
from lightning_aigc.embedded import PREFIX
from lightning_aigc.errors import ConfigError
from lightning_aigc.report.record import RECORD_FILE, Picture, RunRecord, read_run
from lightning_aigc.secrets import redact, without_local_paths

Kind = Literal["lora", "pipeline", "controlnet"]
MOST_IMAGES = 8
CONFIG_FILE = "config.yaml"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
LOCAL_FOLDERS = ("runs", "models", "checkpoints", "weights")
"""Folders that hold models on people's machines: `models/sd15` looks like a hub id."""
LORA_ENDINGS = (".safetensors", ".diffusers.safetensors", ".comfyui.safetensors")
"""The files of one LoRA: for most programs, for diffusers where that is another file, and for ComfyUI."""


@dataclass
class Contents:
    """One trained result, with what its run knows of it."""

    kind: Kind
    name: str
    """Name of the result, without ending."""
    sources: list[Path]
    """The LoRA's files, or the folder of the pipeline or ControlNet."""
    base: str | None
    """The base model as the run's config or the file's header has it."""
    family: Family | None
    trigger_word: str | None = None
    record: RunRecord | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """The run's config; empty for a file without a run."""
    header: Mapping[str, str] = field(default_factory=dict)
    """The LoRA file's header."""

    def setting(self, block: str, key: str) -> Any:
        """A value of the run's config, such as `model`'s `rank`; None where there is none."""
        return ((self.config.get(block) or {}).get("init_args") or {}).get(key)

    @property
    def edits(self) -> bool:
        """Whether it was trained on edits of source images."""
        if self.family is not None and self.family.needs_sources:
            return True
        if self.record is not None and self.record.lora is not None:
            return self.record.lora.edits
        return any(self.setting("data", key) for key in ("source_data_dir", "source_column"))

    @property
    def lokr_of(self) -> str | None:
        """Part of the pipeline that a LoKr adapts; None for others."""
        if self.header.get("ss_network_module") != LOKR_MODULE or self.family is None:
            return None
        return self.family.denoiser_name

    @property
    def hub_base(self) -> str | None:
        """The base where it has an id on the hub."""
        base = self.base or ""
        is_id = HUB_ID.fullmatch(base) is not None and base.partition("/")[0] not in LOCAL_FOLDERS
        return base if is_id and not base.endswith((".safetensors", ".ckpt")) and not Path(base).exists() else None


def find_contents(given: Path) -> Contents:
    """The result in a run's folder, or that of a LoRA file, pipeline folder or ControlNet folder.

    Raises: UserError for a path that is none of them, or a run without a result.
    """
    if given.is_file():
        run = given.parent if (given.parent / RECORD_FILE).is_file() else None
        return _contents([given], "lora", run)
    if not given.is_dir():
        raise ConfigError(f"there is no run and no file {given}; give a run's folder such as runs/my, or a LoRA file")
    kind = _kind_of_folder(given)
    if kind is not None:
        run = given.parent if (given.parent / RECORD_FILE).is_file() else None
        return _contents([given], kind, run)
    if not (given / CONFIG_FILE).is_file():
        raise ConfigError(f"{given} is no run: it has no {CONFIG_FILE}; give a run's folder such as runs/my")
    for stem in _stems(given):
        found = [given / f"{stem}{ending}" for ending in LORA_ENDINGS if (given / f"{stem}{ending}").is_file()]
        kind = _kind_of_folder(given / stem)
        if kind is not None:
            return _contents([given / stem], kind, given)
        if found:
            return _contents(found, "lora", given)
    raise ConfigError(f"the run in {given} has no LoRA, model or ControlNet yet; train it to its end first")


def _stems(run: Path) -> list[str]:
    """Names that the run's result may have, the best weights first."""
    config = _read_config(run)
    name = str(((config.get("model") or {}).get("init_args") or {}).get("output_name") or "lora")
    return [f"{name}_best", name]


def _kind_of_folder(folder: Path) -> Literal["pipeline", "controlnet"] | None:
    if (folder / "model_index.json").is_file():
        return "pipeline"
    return "controlnet" if (folder / "config.json").is_file() else None


def _contents(sources: list[Path], kind: Kind, run: Path | None) -> Contents:
    config = {} if run is None else _read_config(run)
    record = read_run(run) if run is not None and (run / RECORD_FILE).is_file() else None
    model, data = ((config.get(block) or {}).get("init_args") or {} for block in ("model", "data"))
    base = model.get("denoiser_file") or model.get("pretrained_model_name_or_path")
    word = data.get("trigger_word")
    header = _header(sources[0]) if kind == "lora" else {}
    base, word = base or header.get("ss_sd_model_name"), word or header.get("modelspec.trigger_phrase")
    family = _family_of_header(header) if kind == "lora" else _family_of_folder(sources[0], kind)
    name = sources[0].name.removesuffix(".safetensors") if kind == "lora" else sources[0].name
    return Contents(kind, name, sources, base, family, word, record, config, header)


def _read_config(run: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{run / CONFIG_FILE} cannot be read as YAML; copy the run again") from error
    return found if isinstance(found, dict) else {}


def _header(path: Path) -> dict[str, str]:
    """The header of a LoRA file. Raises: ModelError for another file."""
    return dict(read_lora(path).metadata)


def _family_of_header(header: Mapping[str, str]) -> Family | None:
    named = named_base_model(header)
    return next((family for family in FAMILIES.values() if named in family.header_patterns), None)


def _family_of_folder(folder: Path, kind: Kind) -> Family | None:
    file = folder / ("model_index.json" if kind == "pipeline" else "config.json")
    try:
        name = json.loads(file.read_text(encoding="utf-8")).get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read as JSON; copy the folder again") from error
    for family in FAMILIES.values():
        if name == (family.pipeline if kind == "pipeline" else getattr(family.control, "network", None)):
            return family
    return None


# Writing -----------------------------------------------------------------------------------------------------------


def _reads_in_diffusers(lokr: Path) -> bool:
    return unread_by_diffusers(read_lora(lokr).factor_layers()) is None


def write_files(contents: Contents, folder: Path) -> list[str]:
    """Copy the trained files into a folder, without local paths in them; returns the names of a LoRA's files.

    Raises: OSError, and ModelError for a LoRA file that cannot be read.
    """
    if contents.kind == "lora":
        for source in contents.sources:
            _copy_lora(source, folder / source.name)
        names = [source.name for source in contents.sources]
        if contents.lokr_of == UNET and _reads_in_diffusers(contents.sources[0]):  # under its own names alone
            names.append(f"{contents.name}{LORA_ENDINGS[1]}")
            convert(folder / names[0], folder / names[-1], "diffusers")
        return names
    for source in sorted(contents.sources[0].rglob("*")):
        target = folder / source.relative_to(contents.sources[0])
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif source.suffix == ".json":
            target.parent.mkdir(parents=True, exist_ok=True)
            write_text(target, _json_without_paths(source))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return []


def _copy_lora(source: Path, target: Path) -> None:
    with safetensors.safe_open(source, framework="np") as opened:
        header = dict(opened.metadata() or {})
    kept = {key: without_local_paths(value) for key, value in redact(header).items()}
    if kept == header:
        shutil.copyfile(source, target)
        return
    state = read_lora(source).state
    write_atomically(target, serialize(state, {key: value for key, value in kept.items() if key not in HASH_KEYS}))


def _json_without_paths(source: Path) -> str:
    """The text of a JSON file; unchanged unless a value in it is a local path."""
    text = source.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except ValueError:
        return text
    kept = without_local_paths(found)
    return text if kept == found else json.dumps(kept, indent=2, ensure_ascii=False) + "\n"


def write_images(contents: Contents, folder: Path) -> list[tuple[str, str]]:
    """Write the run's images after training as PNG files; returns the prompt and path of each, relative to `folder`."""
    if contents.record is None:
        return []
    by_prompt: dict[str, list[Picture]] = {}
    for each in contents.record.pictures:
        if not each.is_other and each.after:
            by_prompt.setdefault(each.prompt, []).append(each)
    rounds = itertools.zip_longest(*by_prompt.values())  # the first seed of each prompt, then the second
    written: list[tuple[str, str]] = []
    for each in [found for row in rounds for found in row if found is not None][:MOST_IMAGES]:
        image = _decoded(each.after)
        if image is not None:
            path = f"images/{len(written)}.png"
            (folder / "images").mkdir(exist_ok=True)
            image.save(folder / path)
            written.append((each.prompt, path))
    return written


def _decoded(uri: str) -> Image.Image | None:
    """The image of a data URI, without its metadata; None for a text that is none."""
    try:
        with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2], validate=True))) as image:
            return image.convert("RGB")
    except (OSError, binascii.Error):
        return None


def write_config(contents: Contents, folder: Path) -> bool:
    """Write the run's config without secrets and local paths; whether there is one."""
    if contents.config:
        kept = without_local_paths(redact(contents.config))
        write_text(folder / CONFIG_FILE, yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))
    return bool(contents.config)


def is_embedded(base: str | None) -> bool:
    """Whether the base is one of this package's models."""
    return base is not None and base.startswith(PREFIX)
