"""DeepSpeed's ds_config.json and accelerate's config file: what each key becomes here, in one line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning_aigc.errors import ConfigError
from lightning_aigc.strategies.deepspeed_keys import (
    ACCELERATE_NO_EFFECT,
    AUTO,
    NO_EFFECT,
    ONE_BIT,
    OPTIMIZERS,
    REFUSED,
    TAKEN,
)


@dataclass
class Imported:
    """What a file says, as a config of ours, and a line for each of its keys."""

    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    """Arguments of ZeROStrategy."""
    precision: dict[str, Any] = field(default_factory=dict)
    """Arguments of FusedBackwardPrecision."""
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def as_config(self) -> dict[str, Any]:
        """The YAML's nested mapping."""
        trainer = dict(self.trainer)
        trainer["strategy"] = {"class_path": "ZeROStrategy", "init_args": {"stage": 2, **self.strategy}}
        if self.precision:
            trainer["plugins"] = {"class_path": "FusedBackwardPrecision", "init_args": dict(self.precision)}
        config: dict[str, Any] = {"trainer": trainer}
        if self.model:
            config["model"] = {"init_args": dict(self.model)}
        if self.data:
            config["data"] = {"init_args": dict(self.data)}
        return config


def import_file(path: str | Path) -> Imported:
    """Read a ds_config.json or accelerate's YAML file.

    Raises: ConfigError for a file that cannot be read, and for a key that asks for what is not built.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml

            given = yaml.safe_load(text)
        else:
            given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    except Exception as error:  # yaml's errors have no common base that is imported here
        raise ConfigError(f"{path} is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path} holds {type(given).__name__}, wanted an object with keys such as zero_optimization")
    found = Imported()
    read = _read_accelerate if path.suffix in (".yaml", ".yml") else _read_deepspeed
    try:
        read(given, found, path)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} has a value of another kind than its key takes: {error}") from None
    return found


def _read_deepspeed(given: dict[str, Any], found: Imported, path: Path) -> None:
    for key, value in _flat(given).items():
        if value == AUTO:
            found.lines.append(f"{key}: auto, the YAML's value")
        elif key in NO_EFFECT or key.split(".")[0] in NO_EFFECT:
            found.lines.append(f"{key}: no effect here: {NO_EFFECT.get(key) or NO_EFFECT[key.split('.')[0]]}")
        else:
            refused = REFUSED.get(key) or REFUSED.get(key.split(".")[0])
            if refused and (value is True or value not in (False, 1, None)):  # 1 is off for sizes
                raise ConfigError(f"{path}: {key} is not built: {refused}; take the key out")
            if refused:
                found.lines.append(f"{key}: off, as here")
            else:
                _take(key, value, given, found, path)


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
        case ["gradient_clipping"]:
            taken("trainer", found.trainer, "gradient_clip_val", float(value) or None)
        case ["bf16" | "bfloat16" | "fp16", "enabled"]:
            if value:
                taken("FusedBackwardPrecision", found.precision, "precision", "bf16-mixed")
                if key == "fp16.enabled":
                    found.lines[-1] += ", in place of float16 and its loss scale"
            else:
                found.lines.append(f"{key}: off")
        case ["zero_optimization", "stage"]:
            if value not in (1, 2, 3):
                raise ConfigError(f"{path}: zero_optimization.stage must be 1, 2 or 3, got {value}; 0 is strategy ddp")
            taken("ZeROStrategy", found.strategy, "stage", value)
        case ["zero_optimization", "offload_optimizer" | "offload_param", part]:
            _take_offload(key, part, value, found, path)
        case ["zero_optimization", "cpu_offload"]:
            taken("ZeROStrategy", found.strategy, "offload_optimizer", bool(value))
        case ["activation_checkpointing", "partition_activations" | "cpu_checkpointing" as name]:
            if value:
                taken("FusedBackwardPrecision", found.precision, "memory", "max")
                found.lines[-1] += ": a block keeps the input of its rank's batch alone"
                if name == "cpu_checkpointing":
                    found.precision["offload"] = True
                    found.lines[-1] += ", and offload: True: it waits in host memory"
            else:
                found.lines.append(f"{key}: off")
        case ["optimizer", "type"]:
            _take_optimizer(str(value), given, found, path)
        case ["optimizer", "params", *_] | ["scheduler", "params", *_] | ["optimizer", "legacy_fusion"]:
            pass  # with its type
        case ["scheduler", "type"]:
            params = dict(given["scheduler"].get("params") or {})
            warmup = params.get("warmup_num_steps", 0)
            found.model |= {"lr_scheduler": "constant"}
            if warmup != AUTO:
                found.model["lr_warmup_steps"] = int(warmup)
            found.lines.append(f"scheduler {value}: model.lr_scheduler constant, lr_warmup_steps {warmup}")
        case _:
            known = [*NO_EFFECT, *REFUSED, *TAKEN]
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}" if near else ""
            raise ConfigError(f"{path}: {key} is no key of DeepSpeed that is known here{hint}; take it out")


def _take_offload(key: str, part: str, value: Any, found: Imported, path: Path) -> None:
    if part == "device":
        if value == "nvme":
            raise ConfigError(f"{path}: {key}: nvme is not built; use cpu, or more ranks: states are 8 bytes a value")
        if value == "cpu":
            found.strategy["offload_optimizer"] = True
        found.lines.append(f"{key}: ZeROStrategy.offload_optimizer: {str(value == 'cpu').lower()}")
    elif part in ("nvme_path", "buffer_count", "buffer_size", "fast_init", "ratio", "max_in_cpu", "pin_memory"):
        found.lines.append(f"{key}: no effect here: host memory is pinned where there is an accelerator")
    else:
        raise ConfigError(f"{path}: {key} is no key of DeepSpeed that is known here; take it out")


def _take_optimizer(kind: str, given: dict[str, Any], found: Imported, path: Path) -> None:
    if kind.lower().replace("_", "") in ONE_BIT:
        raise ConfigError(
            f"{path}: optimizer.type {kind} is not built: use AdamW, and between_nodes: int3 for few bits on the wire"
        )
    if kind.lower() not in OPTIMIZERS:
        raise ConfigError(
            f"{path}: optimizer.type {kind} is not known here; use one of Adam, AdamW and SGD, or set model.optimizer"
        )
    params = dict(given["optimizer"].get("params") or {})
    kept = {name: params[name] for name in ("lr", "betas", "eps", "weight_decay", "momentum") if name in params}
    kept = {name: value for name, value in kept.items() if value != AUTO}
    found.model["optimizer"] = {"class_path": OPTIMIZERS[kind.lower()], "init_args": kept}
    if "lr" in kept:
        found.model["learning_rate"] = kept["lr"]
    found.lines.append(f"optimizer {kind}: model.optimizer {OPTIMIZERS[kind.lower()]} {kept}")
    for name in params.keys() - {"lr", "betas", "eps", "weight_decay", "momentum"}:
        found.lines.append(f"optimizer.params.{name}: no effect here: torch's {kind} is used")


def _read_accelerate(given: dict[str, Any], found: Imported, path: Path) -> None:
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
                if name in ACCELERATE_NO_EFFECT:
                    found.lines.append(f"deepspeed_config.{name}: no effect here")
                    continue
                place = translated
                *above, last = names.get(name, (name,))
                for step in above:
                    place = place.setdefault(step, {})
                place[last] = of
            _read_deepspeed(translated, found, path)
            if file is not None:
                further = import_file(path.parent / file)
                for block in ("trainer", "strategy", "precision", "model", "data"):
                    getattr(found, block).update(getattr(further, block))
                found.lines += further.lines
        elif key == "mixed_precision":
            if str(value) in ("bf16", "fp16"):
                found.precision["precision"] = "bf16-mixed"
            found.lines.append(f"mixed_precision: FusedBackwardPrecision.precision: {found.precision.get('precision')}")
        elif key == "num_processes":
            found.trainer["devices"] = int(value) // int(given.get("num_machines") or 1)
            found.lines.append(f"num_processes: trainer.devices: {found.trainer['devices']}")
        elif key == "num_machines":
            found.trainer["num_nodes"] = int(value)
            found.lines.append(f"num_machines: trainer.num_nodes: {value}")
        elif key in ACCELERATE_NO_EFFECT:
            found.lines.append(f"{key}: no effect here: how ranks start is the launcher's")
        else:
            raise ConfigError(f"{path}: {key} is no key of accelerate's config that is known here; take it out")


def _flat(value: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones; an empty object is nothing."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        place = f"{path}{key}"
        flat |= _flat(item, f"{place}.") if isinstance(item, dict) else {place: item}
    return flat
