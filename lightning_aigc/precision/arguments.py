"""Check the arguments of FusedBackwardPrecision, alone and against the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args

from lightning_aigc.errors import ConfigError
from lightning_aigc.precision.memory.budget import MemoryBudget, MemoryLevel
from lightning_aigc_kernels.protection import GradientProtection

PrecisionName = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "bf16-forward-fp16-backward"]
MemoryArgument = MemoryLevel | Literal["fit", False] | dict[str, float]
"""A level, or a budget: "fit", {"kept": share} or {"peak_gb": GiB}. YAML 1.1 reads an unquoted `off` as false."""

# Short names that Lightning's `precision` accepts.
SHORT_NAMES = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


def check_arguments(
    precision: object,
    memory: object,
    protect: object,
    strict: object,
    densities: dict[str, Any],
    offload: object = False,
    graph: object = False,
) -> None:
    """Raise ConfigError for the first invalid argument, or for two that exclude each other."""
    _check_choice("precision", precision, get_args(PrecisionName), SHORT_NAMES.get(str(precision)))
    if not isinstance(memory, MemoryBudget):
        _check_choice("memory", memory, (*get_args(MemoryLevel), "fit"), ending=", {kept: 0.18} or {peak_gb: 6}")
    if isinstance(protect, str) or not isinstance(protect, Sequence):
        raise ConfigError(f"protect must be a list of module-name patterns, got {protect!r}; write [{protect!r}]")
    for pattern in protect:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"protect must hold module-name patterns such as 'vae.decoder', got {pattern!r}")
    if not isinstance(strict, bool):
        raise ConfigError(f"strict must be true or false, got {strict!r}")
    if strict and memory == "off":
        raise ConfigError(
            "strict: true refuses blocks that run their class's forward, and with memory: off all do; use"
            " memory: balanced, or strict: false"
        )
    if not isinstance(offload, bool):
        raise ConfigError(f"offload must be true or false, got {offload!r}")
    if not isinstance(graph, bool) and graph != "auto":
        raise ConfigError(f"graph must be auto, true or false, got {graph!r}")
    if graph is True and offload:
        raise ConfigError("graph: true cannot record offload's copies to host memory; set offload or graph to false")
    if offload and memory != "max":
        raise ConfigError(
            f"offload moves the blocks' inputs, which are what memory: max keeps, got memory: {memory};"
            " set memory: max, or leave offload out"
        )
    for name, density in densities.items():
        is_number = isinstance(density, (int, float)) and not isinstance(density, bool)
        if not is_number or not 0 < density <= 1:  # written so that NaN fails too
            raise ConfigError(f"{name} must be in (0, 1], got {density!r}; 1 keeps every entry")
        if density != 1 and memory == "off":
            raise ConfigError(
                f"{name}: {density} needs the fused backward, and memory: off has none; use memory: balanced"
            )
    if precision == "bf16-forward-fp16-backward" and memory == "off":
        raise ConfigError(
            "bf16-forward-fp16-backward computes float16 products in the fused backward, and memory: off has none;"
            " use memory: balanced, or precision: bf16-mixed"
        )


def check_protection(names: Iterable[str], patterns: Sequence[str]) -> GradientProtection:
    """Return the GradientProtection of these patterns, checked against the names of the model's modules.

    Raises: ConfigError for a pattern that covers no module.
    """
    protection = GradientProtection(patterns)
    try:
        protection.check(names)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return protection


def _check_choice(name: str, value: object, choices: Sequence[str], meant: str | None = None, ending: str = "") -> None:
    if isinstance(value, str) and value in choices:
        return
    near = [meant] if meant else get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{name} must be one of {', '.join(choices)}{ending}, got {value!r}{hint}")
