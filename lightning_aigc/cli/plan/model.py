"""Inputs of `lightning plan` from a config: parameter counts, sync options and the time of one step."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_aigc.errors import ConfigError

DRY_RUN_LIMIT = 50e6
"""The most parameters of a model that is timed by a dry run; larger models would take minutes."""
DRY_RUN_TIMEOUT_S = 300


@dataclass(frozen=True)
class Counted:
    """Parameter counts by how gradients are sent."""

    trainable: int
    protected: int
    small: int
    frozen: int
    frozen_bytes: float
    """Mean bytes per frozen parameter."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shape of each trained parameter."""


def read_configs(paths: Sequence[Path]) -> dict[str, Any]:
    """Merge the configs, later ones win. Raises: ConfigError for a file that is no YAML mapping."""
    import yaml

    merged: dict[str, Any] = {}
    for path in paths:
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"the config {path} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(
                f"the config {path} holds {type(config).__name__}, wanted blocks such as trainer and model"
            )
        merged = _merge(merged, config)
    return merged


def sync_options(config: Mapping[str, Any]) -> tuple[Any, bool]:
    """The SyncOptions of a config, and whether its strategy is npu_sparse, which uses them.

    Raises: ConfigError for a value out of range.
    """
    from lightning_aigc.gradient_sync.options import SyncOptions

    strategy = (config.get("trainer") or {}).get("strategy")
    if isinstance(strategy, dict):
        ours = str(strategy.get("class_path", "")).rpartition(".")[2] == "NPUSparseStrategy"
        known = {field.name for field in fields(SyncOptions)}
        given = {name: value for name, value in (strategy.get("init_args") or {}).items() if name in known}
        return SyncOptions(**given) if ours else SyncOptions(), ours
    return SyncOptions(), strategy == "npu_sparse"


def count_parameters(config: Mapping[str, Any], options: Any) -> Counted:
    """Build the config's model on the CPU, as fit would, and count its parameters.

    Raises: ConfigError if its pipeline is not on this machine; ModelError if it cannot be built.
    """
    block = config.get("model")
    if not isinstance(block, dict) or "class_path" not in block:
        raise ConfigError(
            "the config has no model block with a class_path; pass --trainable, such as --trainable 859.5M"
        )
    block = _with_local_model(block)
    from lightning_aigc._lightning import LightningModule
    from lightning_aigc.cli.fit.aigc_cli import AIGCArgumentParser
    from lightning_aigc.cli.fit.dry_run import all_parameters
    from lightning_aigc.gradient_sync.units import is_small

    parser = AIGCArgumentParser()
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    model = parser.instantiate_classes(parser.parse_object({"model": block})).model
    model.configure_model()

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    protection = options.protection(trained)
    protected = {name for name in trained if protection.covers(name)}
    small = {name for name, p in trained.items() if name not in protected and is_small(p)}
    frozen = [p for p in all_parameters(model) if not p.requires_grad]
    frozen_count = sum(p.numel() for p in frozen)
    return Counted(
        trainable=sum(p.numel() for p in trained.values()),
        protected=sum(trained[name].numel() for name in protected),
        small=sum(trained[name].numel() for name in small),
        frozen=frozen_count,
        frozen_bytes=sum(p.numel() * p.element_size() for p in frozen) / max(frozen_count, 1),
        shapes=tuple(tuple(p.shape) for p in trained.values()),
    )


def time_one_step(paths: Sequence[Path]) -> float:
    """Seconds of one step on one card of this machine with its warm-up, from `lightning fit --dry_run`.

    Raises: ConfigError if the dry run fails or takes too long.
    """
    command = [
        *(sys.executable, "-m", "lightning_aigc", "fit", *(part for path in paths for part in ("-c", str(path)))),
        *("--dry_run", "--trainer.devices", "1", "--trainer.num_nodes", "1", "--trainer.strategy", "auto"),
    ]
    wanted = "pass --step_time, the seconds of one step on one card, such as --step_time 1.2"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRY_RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the dry run that times a step took over {DRY_RUN_TIMEOUT_S} s; {wanted}") from error
    match = re.search(r"one step: ([\d.]+) s", done.stdout)
    if done.returncode or match is None:
        last = (done.stderr.strip().splitlines() or ["it printed no time"])[-1]
        raise ConfigError(f"the dry run that times a step failed: {last.removeprefix('error: ')}; {wanted}")
    return max(float(match[1]), 0.01)


def _with_local_model(block: dict[str, Any]) -> dict[str, Any]:
    """The config's model block; a hub id becomes the folder that the hub's cache has of it.

    Raises: ConfigError for a model that is not on this machine.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from lightning_aigc.diffusion.families import full_name
    from lightning_aigc.embedded import resolve

    init_args = block.get("init_args") or {}
    given = init_args.get("pretrained_model_name_or_path")
    if given is None or resolve(str(given)).exists():
        return block
    source = full_name(str(given))
    try:
        cached = try_to_load_from_cache(str(source), "model_index.json", revision=init_args.get("revision"))
    except HFValidationError:  # a path, and no id
        cached = None
    if not isinstance(cached, str):
        raise ConfigError(
            f"the model {source} is neither on this machine nor in the hub's cache, so its parameters cannot be "
            "counted; pass --trainable and --step_time, or a -c file that names a folder"
        )
    return {**block, "init_args": {**init_args, "pretrained_model_name_or_path": str(Path(cached).parent)}}


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merge(base[key], value) for key, value in over.items() if _are_dicts(base.get(key), value)}
    return {**base, **over, **both}


def _are_dicts(first: object, second: object) -> bool:
    return isinstance(first, dict) and isinstance(second, dict)
