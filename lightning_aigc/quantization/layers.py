"""Frozen layers of a module whose weights can be quantized, and the reasons why others cannot."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_aigc.errors import ConfigError
from lightning_aigc_kernels.packed_weight import Format, PackedWeight
from lightning_aigc_kernels.protection import GradientProtection, named_modules

MIB = 2**20
Kind = Literal["int8", "fp8", "nf4", "nf4-all"]
BaseQuantization = Kind | dict[str, float]
"""A kind, or a budget such as `{"target_mib": 1500}`."""
FORMATS: dict[str, tuple[Format, Format]] = {
    "int8": ("int8", "int8"),
    "fp8": ("fp8", "fp8"),
    "nf4": ("nf4", "int8"),
    "nf4-all": ("nf4", "nf4"),
}
"""Format of linear layers and of convolutions, by kind."""
SKIP = ("conv_in", "conv_out", "time_embedding", "add_embedding")
"""Layers that stay in full precision by default: they are small and the most sensitive."""
LINEAR, CONVOLUTIONS = nn.Linear, (nn.Conv1d, nn.Conv2d, nn.Conv3d)
FEWEST_NUMBERS = 4096
"""Numbers of a weight below which it stays in full precision: it saves nothing and is often sensitive."""
QUANTIZED_BY = {
    "bitsandbytes": "bitsandbytes", "optimum": "quanto", "torchao": "torchao", "hqq": "HQQ",
    "diffusers.quantizers.gguf": "GGUF", "sdnq": "SDNQ", "auto_round": "AutoRound",
}  # fmt: skip
"""Names of other quantization libraries, by the start of their modules' names."""
FULL_PRECISION = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Layer:
    """A frozen linear layer or convolution."""

    name: str
    """Name without peft's `base_layer`."""
    module: nn.Module
    skip_reason: str = ""
    """Reason why its weight stays in full precision; empty if it can be quantized."""

    @property
    def weight(self) -> Tensor:
        return self.module.get_parameter("weight")

    @property
    def is_linear(self) -> bool:
        return type(self.module) is LINEAR


Packing = Callable[[Layer, Format], PackedWeight]
"""Function that packs a layer's weight in a format."""


def check_kind(kind: object) -> None:
    """Raise ConfigError for an unknown kind."""
    if not isinstance(kind, str) or kind not in FORMATS:
        near = difflib.get_close_matches(str(kind), get_args(Kind), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"base_quantization must be null, one of {', '.join(FORMATS)}, or {{target_mib: 1500}}, got {kind!r}{hint}"
        )


def target_mib(kind: object) -> float | None:
    """Read the budget in MiB from `base_quantization`; None if it names a kind. Raises: ConfigError."""
    if not isinstance(kind, Mapping):
        return None
    if set(kind) != {"target_mib"}:
        raise ConfigError(f"base_quantization as a budget is {{target_mib: 1500}}, got {dict(kind)!r}")
    value = kind["target_mib"]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"base_quantization.target_mib must be a number of MiB above 0, got {value!r}")
    return float(value)


def check_skip(skip: Sequence[str] | None) -> None:
    """Raise ConfigError unless `skip` is None or a list of name patterns."""
    if skip is None:
        return
    if isinstance(skip, str) or not isinstance(skip, Sequence):
        raise ConfigError(f"base_quantization_skip must be a list of name patterns, got {skip!r}; write [{skip!r}]")
    if not all(isinstance(pattern, str) and pattern.strip() for pattern in skip):
        raise ConfigError(f"base_quantization_skip must hold name patterns such as 'conv_in', got {list(skip)}")


def check_patterns(skip: Sequence[str] | None, names: Iterable[str]) -> None:
    """Raise ConfigError for a pattern that covers none of these layers, which is probably misspelled."""
    names = list(names)
    for pattern in skip or ():
        if not any(GradientProtection((pattern,)).covers(name) for name in names):
            parts = {".".join(name.split(".")[-2:]) for name in names} | {p for name in names for p in name.split(".")}
            close = difflib.get_close_matches(pattern, sorted(parts), n=3, cutoff=0.5)
            hint = f"; close names: {', '.join(close)}" if close else ""
            raise ConfigError(f"base_quantization_skip: {pattern!r} covers no frozen layer{hint}")


def frozen_layers(module: nn.Module, skip: Sequence[str] | None = None) -> list[Layer]:
    """Return the frozen linear layers and convolutions of a module.

    Raises: ConfigError if the module is quantized already.
    """
    skipped = GradientProtection(SKIP if skip is None else tuple(skip))
    candidates = list(_candidates(module))
    uses = Counter(id(parameter) for submodule in module.modules() for parameter in submodule._parameters.values())
    return [Layer(name, layer, _skip_reason(name, layer, skipped, uses)) for name, layer in candidates]


def _candidates(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in named_modules(module):
        name = ".".join(word for word in name.split(".") if word != "base_layer")
        _refuse_quantized(name, layer)
        if type(layer) in (LINEAR, *CONVOLUTIONS) and not any(p.requires_grad for p in layer.parameters()):
            yield name, layer


def _skip_reason(name: str, layer: nn.Module, skipped: GradientProtection, uses: Counter[int]) -> str:
    if skipped.covers(name):
        return "skipped by name"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "without a plain weight"
    if weight.numel() < FEWEST_NUMBERS:
        return f"smaller than {FEWEST_NUMBERS} numbers"
    if uses[id(weight)] > 1:
        return "shared with another layer"
    return ""


def _refuse_quantized(name: str, layer: nn.Module) -> None:
    """Raise ConfigError for a layer whose weight is quantized already."""
    for parameter in layer._parameters.values():
        if parameter is None or parameter.requires_grad:
            continue
        by = "base_quantization" if isinstance(parameter, PackedWeight) else None
        for owner in (layer, parameter):
            path = type(owner).__module__
            by = by or next((library for start, library in QUANTIZED_BY.items() if path.startswith(start)), None)
        if by is None and isinstance(layer, (LINEAR, *CONVOLUTIONS)) and parameter.dtype not in FULL_PRECISION:
            by = f"something that left {parameter.dtype}"
        if by is not None:
            raise ConfigError(
                f"base_quantization: {name or 'the module'} is quantized already, by {by}; load the full-precision"
                " weights, or leave base_quantization unset"
            )
