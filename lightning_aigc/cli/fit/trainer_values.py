"""Refuse values of the right type that the Trainer would meet with a traceback, another's advice or a long silence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from lightning_aigc._lightning import AcceleratorRegistry, StrategyRegistry
from lightning_aigc.errors import ConfigError

MOST_PROCESSES_PER_CORE = 8
"""On a CPU; each process holds the model, and more would wait for one another."""
GPUS = ("cuda", "mps")
LISTED_STRATEGIES = ("auto", "ddp", "npu_sparse", "zero_1", "zero_2", "zero_3")


def check_trainer_values(trainer: Mapping[str, Any]) -> None:
    """Check the config's trainer block against this machine. Raises: ConfigError with what to type instead."""
    if (trainer.get("accumulate_grad_batches") or 0) < 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches must be at least 1, got {trainer.get('accumulate_grad_batches')}"
        )
    if (trainer.get("gradient_clip_val") or 0) < 0:
        raise ConfigError(
            f"trainer.gradient_clip_val must be above 0, got {trainer['gradient_clip_val']}; set"
            " trainer.gradient_clip_val: null to clip nothing"
        )
    _check_precision(trainer)
    strategy = trainer.get("strategy")
    _check_strategy(strategy)
    accelerator = trainer.get("accelerator")
    if isinstance(accelerator, str):
        kind = _kind_of(accelerator)
        if kind == "cpu" and isinstance(strategy, str) and strategy.startswith("fsdp"):
            raise ConfigError(
                f"trainer.strategy: {strategy} takes GPUs, and this run is on the CPU; set"
                " trainer.strategy: zero_3, which shards there too"
            )
        if kind in (*GPUS, "cpu"):  # NPUs have an error of their own
            _check_devices(trainer.get("devices"), kind)


def _check_precision(trainer: Mapping[str, Any]) -> None:
    """Refuse a precision next to the plugin that sets one: Lightning would ask to choose, and not say how."""
    precision, plugins = trainer.get("precision"), trainer.get("plugins")
    for at, plugin in enumerate(plugins if isinstance(plugins, list) else [plugins]):
        name = str(plugin.get("class_path", "")).rpartition(".")[2] if isinstance(plugin, Mapping) else ""
        if precision is not None and name == "FusedBackwardPrecision":
            place = f"trainer.plugins[{at}]" if isinstance(plugins, list) else "trainer.plugins"
            raise ConfigError(
                f"trainer.precision: {precision} and the plugin {name} both set the precision; set"
                f" {place}.init_args.precision: {precision}, and trainer.precision: null"
            )


def _check_strategy(strategy: Any) -> None:
    known = ["auto", *StrategyRegistry.available_strategies()]
    if not isinstance(strategy, str) or strategy in known:
        return
    near = get_close_matches(strategy, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"take one of {', '.join(LISTED_STRATEGIES)}"
    raise ConfigError(f"trainer.strategy: there is no strategy {strategy!r}; {hint}")


def _kind_of(accelerator: str) -> str:
    """The registry's name of the accelerator that Lightning takes. Raises: ConfigError for one that is not here."""
    known = sorted(AcceleratorRegistry.available_accelerators())
    if accelerator not in ("auto", "gpu", *known):
        near = get_close_matches(accelerator, ["auto", "gpu", *known], n=1)
        hint = f"did you mean {near[0]}?" if near else f"take one of auto, gpu, {', '.join(known)}"
        raise ConfigError(f"trainer.accelerator: there is no accelerator {accelerator!r}; {hint}")
    if accelerator == "npu":
        return accelerator
    here = [name for name in ("npu", "tpu", *GPUS) if name in known and _is_available(name)]
    if accelerator == "auto":
        return next(iter(here), "cpu")
    if accelerator == "gpu":
        accelerator = next((name for name in GPUS if name in here), accelerator)
    if accelerator not in (*here, "cpu"):
        raise ConfigError(
            f"trainer.accelerator: this machine has no {accelerator} that torch can use; add --trainer.accelerator auto"
            " to train on what is here; `lightning doctor` says what is missing"
        )
    return accelerator


def _is_available(accelerator: str) -> bool:
    return bool(AcceleratorRegistry[accelerator]["accelerator"].is_available())


def _check_devices(devices: Any, kind: str) -> None:
    count = int(devices) if isinstance(devices, str) and devices.lstrip("-").isdigit() else devices
    if kind != "cpu":
        there = int(AcceleratorRegistry[kind]["accelerator"].auto_device_count())
        if isinstance(count, int) and count > there:
            raise ConfigError(
                f"trainer.devices: got {count}, and this machine has {there} {kind} device{'s' * (there > 1)}; add"
                f" --trainer.devices {there}"
            )
        return
    if devices == "auto" or devices is None:
        return
    if not isinstance(count, int) or count < 1:
        raise ConfigError(
            f"trainer.devices: got {devices}, wanted a number of processes on the CPU; add --trainer.devices 1"
        )
    most = MOST_PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if count > most:
        raise ConfigError(
            f"trainer.devices: got {count}, and this machine's {os.cpu_count()} cores carry {most} processes at most;"
            " add --trainer.devices 1"
        )
