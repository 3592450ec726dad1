"""Import of DeepSpeed's ds_config.json and accelerate's config file, with one line about each key."""

from __future__ import annotations

import fnmatch
import warnings
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning_aigc.errors import ConfigError
from lightning_aigc.strategies.deepspeed.keys import (
    ACCELERATE_NO_EFFECT,
    AUTO,
    NO_EFFECT,
    REFUSED,
    SIZES,
    TAKEN,
    found_in,
    no_object,
)
from lightning_aigc.strategies.deepspeed.lenient_json import plain_values, read_json
from lightning_aigc.strategies.deepspeed.training import take_optimizer, take_scheduler

CLIPPING = 1.0
"""DeepSpeed 0.19's default of gradient_clipping; older versions do not clip by default."""


@dataclass
class Imported:
    """Config blocks of a file, and a line for each of its keys."""

    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    """Arguments of ZeROStrategy."""
    precision: dict[str, Any] = field(default_factory=dict)
    """Arguments of FusedBackwardPrecision."""
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """One line for each key."""
    notes: list[str] = field(default_factory=list)
    """One note for each DeepSpeed default that applies because a key is missing."""

    def as_config(self) -> dict[str, Any]:
        """Return the nested mapping of the YAML."""
        trainer = dict(self.trainer)
        stage = self.strategy.get("stage", 2)
        zero = {"class_path": "ZeROStrategy", "init_args": {"stage": stage, **self.strategy}}
        trainer["strategy"] = zero if stage else "ddp"
        if self.precision:
            trainer["plugins"] = {"class_path": "FusedBackwardPrecision", "init_args": dict(self.precision)}
        config: dict[str, Any] = {"trainer": trainer}
        if self.model:
            config["model"] = {"init_args": dict(self.model)}
        if self.data:
            config["data"] = {"init_args": dict(self.data)}
        return config


def import_file(path: str | Path, *, of_accelerate: bool = False) -> Imported:
    """Read a ds_config.json or accelerate's YAML file.

    of_accelerate: the file is one that accelerate's YAML names, so it is DeepSpeed's own.
    Raises: ConfigError for a file that cannot be read, and for a key that asks for what is not built.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml

            given = plain_values(yaml.safe_load(text))
        else:
            given = plain_values(read_json(text))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    except Exception as error:  # yaml's errors have no common base that is imported here
        raise ConfigError(f"{path} is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path} holds {type(given).__name__}, wanted an object with keys such as zero_optimization")
    found = Imported()
    try:
        if {"compute_environment", "distributed_type", "deepspeed_config"} & given.keys():
            if of_accelerate:
                raise ConfigError(f"{path} is accelerate's own file; deepspeed_config_file takes a ds_config.json")
            _read_accelerate(given, found, path)
        else:
            _read_deepspeed(given, found, path)
            _take_defaults(given, found)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} has a value of another kind than its key takes: {error}") from None
    return found


def _read_deepspeed(given: dict[str, Any], found: Imported, path: Path) -> None:
    tables = (NO_EFFECT, REFUSED, dict.fromkeys(TAKEN, ""), dict.fromkeys(SIZES, ""))
    sections = {name.split(".")[0] for table in tables for name in table}
    known = [key for key in given if get_close_matches(key, sections, n=1, cutoff=0.9)]
    if 2 * len(known) < len(given):
        raise ConfigError(
            f"{path} holds {len(known)} of DeepSpeed's keys, such as zero_optimization, and {len(given) - len(known)}"
            " others; give a ds_config.json"
        )
    if wrong := no_object(given):
        raise ConfigError(f"{path}: {wrong}")
    for key, value in _flat(given).items():
        section = _section(given, key)
        if value == AUTO and not key.startswith(("optimizer.", "scheduler.", "zero_optimization.stage")):
            found.lines.append(f"{key}: auto, the YAML's value")
        elif value is None:
            found.lines.append(f"{key}: null, as if it were not there")
        elif key in SIZES:
            if int(value) > 1:
                raise ConfigError(f"{path}: {key} {value} is not built: a rank reads batches of its own; take it out")
            found.lines.append(f"{key}: off, as here")
        elif refused := found_in(key, REFUSED):
            decides = key.endswith(".enabled") or "enabled" not in section
            if decides and not _is_off(value):
                raise ConfigError(f"{path}: {key} is not built: {refused}; take the key out")
            found.lines.append(f"{key}: off, as here")
        elif key not in TAKEN and (reason := found_in(key, NO_EFFECT)):
            found.lines.append(f"{key}: no effect here: {reason}")
        else:
            _take(key, value, given, found, path)


def _section(given: dict[str, Any], key: str) -> set[str]:
    """Return the last parts of all keys in the top section of this key."""
    held = given[key.split(".")[0]]
    inside = held.get(key.split(".")[1]) if key.startswith("zero_optimization.") else held
    return {name.split(".")[-1] for name in _flat(inside)} if isinstance(inside, dict) else set()


def _is_off(value: Any) -> bool:
    return value in (False, 0, None)


def _take_defaults(given: dict[str, Any], found: Imported) -> None:
    """Take DeepSpeed's defaults of the keys that a ds_config.json does not name."""
    if "stage" not in found.strategy:
        found.strategy["stage"] = 0
        found.notes.append("zero_optimization: not in the file: stage 0, as in DeepSpeed: strategy ddp")
    _take_clipping(given, found)


def _take_clipping(given: dict[str, Any], found: Imported) -> None:
    if given.get("gradient_clipping") is None and "gradient_clip_val" not in found.trainer:
        found.trainer["gradient_clip_val"] = CLIPPING
        found.notes.append(
            f"gradient_clipping: not in the file: trainer.gradient_clip_val {CLIPPING}, as in DeepSpeed 0.19; for an"
            " older one, which does not clip then, write gradient_clipping: 0 into the file"
        )


def _take(key: str, value: Any, given: dict[str, Any], found: Imported, path: Path) -> None:
    def taken(place: str, block: dict[str, Any], name: str, now: Any) -> None:
        block[name] = now
        found.lines.append(f"{key}: {place}.{name}: {now}")

    match key.split("."):
        case ["train_micro_batch_size_per_gpu"]:
            taken("data.init_args", found.data, "train_batch_size", int(value))
        case ["train_batch_size"]:
            found.lines.append(f"{key}: the product of the ranks, data.train_batch_size and accumulate_grad_batches")
        case ["gradient_accumulation_steps"]:
            taken("trainer", found.trainer, "accumulate_grad_batches", int(value))
        case ["gradient_clipping"] | ["optimizer", "params", "max_grad_norm"]:
            taken("trainer", found.trainer, "gradient_clip_val", float(value) if float(value) > 0 else None)
        case ["gradient_allreduce_op"]:
            if str(value).lower() not in ("avg", "mean", "average"):
                raise ConfigError(f"{path}: {key} {value} is not built: gradients are averaged over ranks; take it out")
            found.lines.append(f"{key}: an average, as here")
        case ["bf16" | "bfloat16" | "fp16" | "amp" | "torch_autocast", "enabled"]:
            if _is_off(value):
                found.lines.append(f"{key}: off")
            else:
                taken("FusedBackwardPrecision", found.precision, "precision", "bf16-mixed")
                if "float16" in (
                    _dtype(given, "torch_autocast"),
                    "float16" if key in ("fp16.enabled", "amp.enabled") else "",
                ):
                    found.lines[-1] += ", which replaces float16 and its loss scale"
        case ["zero_optimization"]:  # as DeepSpeed once wrote stage 1
            taken("ZeROStrategy", found.strategy, "stage", 1 if value is True else 0)
        case ["zero_optimization", "stage"]:
            if value not in (0, 1, 2, 3):
                raise ConfigError(f"{path}: zero_optimization.stage must be 0 (strategy ddp), 1, 2 or 3, got {value}")
            found.strategy["stage"] = int(value)
            found.lines.append(f"{key}: " + (f"ZeROStrategy.stage: {int(value)}" if value else "strategy ddp"))
        case ["zero_optimization", "offload_optimizer" | "offload_param", part]:
            _take_offload(key, part, value, found, path)
        case ["zero_optimization", "cpu_offload" | "cpu_offload_param" | "cpu_offload_params"]:
            if value:
                taken("ZeROStrategy", found.strategy, "offload_optimizer", True)
            else:
                found.lines.append(f"{key}: off")
        case ["activation_checkpointing", "partition_activations" | "cpu_checkpointing" as name]:
            if value:
                taken("FusedBackwardPrecision", found.precision, "memory", "max")
                found.lines[-1] += ": a block keeps the input of its rank's batch alone"
                if name == "cpu_checkpointing":
                    found.precision["offload"] = True
                    found.lines[-1] += ", and offload: True: it waits in host memory"
            else:
                found.lines.append(f"{key}: off")
        case ["optimizer" | "scheduler" as name, "type"]:
            model, lines = (take_optimizer if name == "optimizer" else take_scheduler)(given[name], path)
            rate = found.model.get("learning_rate") if name == "optimizer" and "lr_scheduler" in found.model else None
            found.model |= model if rate is None else {**model, "learning_rate": rate}  # a schedule's rate stays
            found.lines += lines
        case ["optimizer" | "scheduler", "params", *_]:
            pass  # with its type
        case _:
            _warn_of_unknown(key, found, path)


def _dtype(given: dict[str, Any], section: str) -> str:
    held = given.get(section)
    return {"fp16": "float16", "half": "float16"}.get(str(held.get("dtype")), str(held.get("dtype"))) if held else ""


def _warn_of_unknown(key: str, found: Imported, path: Path) -> None:
    """Warn of a key that DeepSpeed ignores too.

    Raises: ConfigError for one that is a letter off a key that changes the training.
    """
    if near := get_close_matches(key, TAKEN, n=1, cutoff=0.93):
        raise ConfigError(f"{path}: {key} is no key of DeepSpeed; did you mean {near[0]}? Rename it or take it out")
    near = get_close_matches(key, [*NO_EFFECT, *REFUSED, *TAKEN], n=1, cutoff=0.8)
    line = f"{key}: no key of DeepSpeed that is known here; ignored" + (f"; did you mean {near[0]}?" if near else "")
    found.lines.append(line)
    warnings.warn(f"{path}: {line}", stacklevel=5)


def _take_offload(key: str, part: str, value: Any, found: Imported, path: Path) -> None:
    if part == "device":
        if value != "cpu":
            raise ConfigError(
                f"{path}: {key}: {value} is not built; use cpu, or more ranks: states are 8 bytes a value"
            )
        found.strategy["offload_optimizer"] = True
        found.lines.append(f"{key}: ZeROStrategy.offload_optimizer: true")
    else:
        found.lines.append(f"{key}: no effect here: host memory is pinned where there is an accelerator")


def _read_accelerate(given: dict[str, Any], found: Imported, path: Path) -> None:
    kind = str(given.get("distributed_type", "DEEPSPEED")).upper()
    if kind in ("FSDP", "MEGATRON_LM", "TPU", "XLA"):
        raise ConfigError(f"{path}: distributed_type {kind} is not read; set trainer.strategy to ZeROStrategy yourself")
    for key, value in given.items():
        if key == "deepspeed_config" and isinstance(value, dict):
            inner = dict(value)
            file = inner.pop("deepspeed_config_file", None)
            names = {
                "zero_stage": ("zero_optimization", "stage"),
                "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
                "offload_param_device": ("zero_optimization", "offload_param", "device"),
            }
            translated: dict[str, Any] = {}
            for name, of in inner.items():
                if _accelerate_no_effect(name):
                    found.lines.append(f"deepspeed_config.{name}: no effect here")
                    continue
                place = translated
                *above, last = names.get(name, (name,))
                for step in above:
                    place = place.setdefault(step, {})
                place[last] = of
            _read_deepspeed(translated, found, path)
            if file is not None:
                further = import_file(path.parent / file, of_accelerate=True)
                for block in ("trainer", "strategy", "precision", "model", "data"):
                    getattr(found, block).update(getattr(further, block))
                found.lines += further.lines
                found.notes += further.notes
        elif key == "mixed_precision":
            if str(value) == "fp8":
                raise ConfigError(f"{path}: mixed_precision fp8 is not built; use bf16")
            if str(value) in ("bf16", "fp16"):
                found.precision["precision"] = "bf16-mixed"
            found.lines.append(f"mixed_precision: FusedBackwardPrecision.precision: {found.precision.get('precision')}")
        elif key == "num_processes":
            found.trainer["devices"] = int(value) // int(given.get("num_machines") or 1)
            found.lines.append(f"num_processes: trainer.devices: {found.trainer['devices']}")
        elif key == "num_machines":
            found.trainer["num_nodes"] = int(value)
            found.lines.append(f"num_machines: trainer.num_nodes: {value}")
        elif _accelerate_no_effect(key) or not value:
            found.lines.append(f"{key}: no effect here: how ranks start is the launcher's")
        else:
            found.lines.append(f"{key}: no key of accelerate's config that is known here; ignored")
            warnings.warn(f"{path}: {found.lines[-1]}", stacklevel=3)
    inner = given.get("deepspeed_config") or {}
    if kind == "DEEPSPEED" and inner.get("deepspeed_config_file") is None:
        _take_clipping(inner, found)
    if "stage" not in found.strategy:
        found.strategy["stage"] = 2 if kind == "DEEPSPEED" else 0
        found.notes.append(f"zero_stage: not in the file: stage {found.strategy['stage']}, as accelerate's {kind}")


def _accelerate_no_effect(key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, name) for name in ACCELERATE_NO_EFFECT)


def _flat(value: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested keys as dotted keys; an empty object has none."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        place = f"{path}{key}"
        flat |= _flat(item, f"{place}.") if isinstance(item, dict) and item else {} if item == {} else {place: item}
    return flat
