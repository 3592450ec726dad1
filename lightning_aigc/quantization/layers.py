"""Which weights of a module can be packed, in how many bits, and why the others stay as they are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_aigc.errors import ConfigError
from lightning_aigc_kernels.packed_weight import Format, PackedWeight
from lightning_aigc_kernels.protection import GradientProtection, named_modules

Kind = Literal["int8", "nf4", "nf4-all"]
BaseQuantization = Kind | dict[str, float]
"""A kind, or a budget such as `{"target_mib": 1500}`."""
FORMATS: dict[str, tuple[Format, Format]] = {
    "int8": ("int8", "int8"),
    "nf4": ("nf4", "int8"),
    "nf4-all": ("nf4", "nf4"),
}
"""By kind: the format of linear layers, and of convolutions."""
SKIP = ("conv_in", "conv_out", "time_embedding", "add_embedding")
"""What stays whole unless the user says otherwise: few bytes, and the most sensitive."""
LINEAR, CONVOLUTIONS = nn.Linear, (nn.Conv1d, nn.Conv2d, nn.Conv3d)
FEWEST_NUMBERS = 4096
"""Smaller weights stay whole: they save nothing and are often the most sensitive."""
PACKED_BY_OTHERS = {
    "bitsandbytes": "bitsandbytes", "optimum": "quanto", "torchao": "torchao", "hqq": "HQQ",
    "diffusers.quantizers.gguf": "GGUF", "sdnq": "SDNQ", "auto_round": "AutoRound",
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A frozen linear layer or convolution."""

    name: str
    """As the user sees it: without peft's `base_layer`."""
    module: nn.Module
    why_not: str = ""
    """Why its weight stays whole; empty if it can be packed."""

    @property
    def weight(self) -> Tensor:
        return self.module.get_parameter("weight")

    @property
    def is_linear(self) -> bool:
        return type(self.module) is LINEAR


def check_kind(kind: object) -> None:
    """Raise ConfigError for an unknown kind."""
    if not isinstance(kind, str) or kind not in FORMATS:
        near = difflib.get_close_matches(str(kind), get_args(Kind), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"base_quantization must be null, one of {', '.join(FORMATS)}, or {{target_mib: 1500}}, got {kind!r}{hint}"
        )


def check_skip(skip: Sequence[str] | None) -> None:
    """Raise ConfigError for anything but a list of name patterns."""
    if skip is None:
        return
    if isinstance(skip, str) or not isinstance(skip, Sequence):
        raise ConfigError(f"base_quantization_skip must be a list of name patterns, got {skip!r}; write [{skip!r}]")
    if not all(isinstance(pattern, str) and pattern.strip() for pattern in skip):
        raise ConfigError(f"base_quantization_skip must hold name patterns such as 'conv_in', got {list(skip)}")


def check_patterns(skip: Sequence[str] | None, names: Iterable[str]) -> None:
    """Raise ConfigError for a given pattern that covers none of these layers, probably a misspelling."""
    names = list(names)
    for pattern in skip or ():
        if not any(GradientProtection((pattern,)).covers(name) for name in names):
            parts = {".".join(name.split(".")[-2:]) for name in names} | {p for name in names for p in name.split(".")}
            close = difflib.get_close_matches(pattern, sorted(parts), n=3, cutoff=0.5)
            hint = f"; close names: {', '.join(close)}" if close else ""
            raise ConfigError(f"base_quantization_skip: {pattern!r} covers no frozen layer{hint}")


def frozen_layers(module: nn.Module, skip: Sequence[str] | None = None) -> list[Layer]:
    """The frozen linear layers and convolutions of a module.

    Raises: ConfigError if the module is packed already.
    """
    skipped = GradientProtection(SKIP if skip is None else tuple(skip))
    found = list(_candidates(module))
    times: dict[int, int] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            times[id(parameter)] = times.get(id(parameter), 0) + 1
    return [Layer(name, part, _why_not(name, part, skipped, times)) for name, part in found]


def _candidates(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, part in named_modules(module):
        name = ".".join(piece for piece in name.split(".") if piece != "base_layer")
        _refuse_packed(name, part)
        if type(part) in (LINEAR, *CONVOLUTIONS) and not any(p.requires_grad for p in part.parameters()):
            yield name, part


def _why_not(name: str, part: nn.Module, skipped: GradientProtection, times: dict[int, int]) -> str:
    if skipped.covers(name):
        return "skipped by name"
    weight = part._parameters.get("weight")
    if weight is None:
        return "without a plain weight"
    if weight.numel() < FEWEST_NUMBERS:
        return f"smaller than {FEWEST_NUMBERS} numbers"
    if times[id(weight)] > 1:
        return "shared with another layer"
    return ""


def _refuse_packed(name: str, part: nn.Module) -> None:
    """Raise ConfigError for a layer whose weight somebody packed before."""
    for parameter in part._parameters.values():
        if parameter is None or parameter.requires_grad:
            continue
        by = "base_quantization" if isinstance(parameter, PackedWeight) else None
        for thing in (part, parameter):
            path = type(thing).__module__
            by = by or next((who for start, who in PACKED_BY_OTHERS.items() if path.startswith(start)), None)
        if by is None and isinstance(part, (LINEAR, *CONVOLUTIONS)) and parameter.dtype not in WHOLE:
            by = f"something that left {parameter.dtype}"
        if by is not None:
            raise ConfigError(
                f"base_quantization: {name or 'the module'} is packed already, by {by}; load the full-precision"
                " weights, or leave base_quantization unset"
            )


WHOLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
