"""Bits for each frozen weight from a budget of bytes: the formats that move the model's output least."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from lightning_aigc.errors import ConfigError
from lightning_aigc.knapsack import Way, choose
from lightning_aigc.quantization.layers import Layer
from lightning_aigc.quantization.output_error import rounding_errors, squared_gradients
from lightning_aigc_kernels.packed_weight import Format, PackedWeight, packed_bytes

MIB = 2**20
FORMATS_TRIED: tuple[Format, ...] = ("int8", "nf4")
Errors = list[dict[Format, float]]
"""Of each layer, by format: the expected squared error of the output over its squared length."""


def target_mib(kind: object) -> float | None:
    """The budget in MiB that `base_quantization` asks for, None if it names a kind. Raises: ConfigError."""
    if not isinstance(kind, Mapping):
        return None
    if set(kind) != {"target_mib"}:
        raise ConfigError(f"base_quantization as a budget is {{target_mib: 1500}}, got {dict(kind)!r}")
    value = kind["target_mib"]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"base_quantization.target_mib must be a number of MiB above 0, got {value!r}")
    return float(value)


def output_errors(
    layers: Sequence[Layer],
    outputs: Iterable[Tensor],
    packing: Callable[[Layer, Format], PackedWeight] | None = None,
) -> Errors:
    """The output error of packing each layer in each format, measured on these outputs of the model.

    Args: outputs: each is computed when it is asked for, with gradients on, on latents of real pictures.
    """
    found: Errors = []
    for layer, sensitivity_B in zip(layers, squared_gradients(layers, outputs), strict=True):
        weight, errors = layer.weight, {}
        for kind in FORMATS_TRIED:
            packed = packing(layer, kind) if packing is not None else PackedWeight.pack(weight, kind)
            errors[kind] = float((rounding_errors(weight, packed) * sensitivity_B).sum())
        found.append(errors)
    return found


def choose_formats(
    layers: Sequence[Layer], errors: Errors, target_bytes: float, other_bytes: int
) -> list[Format | None]:
    """A format for each layer, None to leave it whole, with the least output error within a budget.

    Args: other_bytes is what the rest of the base takes, which counts towards `target_bytes`.
    Raises: ConfigError for a budget below the least, or one that needs no packing.
    """
    options: list[list[tuple[Format | None, Way]]] = []
    for layer, by_format in zip(layers, errors, strict=True):
        numel = layer.weight.numel()
        packed = [(kind, (float(packed_bytes(numel, kind)), error)) for kind, error in by_format.items()]
        options.append([(None, (float(layer.weight.nbytes), 0.0)), *packed])
    whole = other_bytes + sum(ways[0][1][0] for ways in options)
    if target_bytes >= whole:
        raise ConfigError(
            f"base_quantization: {{target_mib: {target_bytes / MIB:g}}} packs nothing: these weights fit whole, in"
            f" {whole / MIB:.4g} MiB; leave base_quantization unset, or ask for less"
        )
    picks = choose([[way for _, way in ways] for ways in options], target_bytes - other_bytes)
    if picks is None:
        least = other_bytes + sum(min(nbytes for _, (nbytes, _) in ways) for ways in options)
        raise ConfigError(
            f"base_quantization: {{target_mib: {target_bytes / MIB:g}}} cannot be met: with every weight in 4 bits the"
            f" base has {least / MIB:.4g} MiB; ask for {math.ceil(10 * least / MIB) / 10:g} or more"
        )
    return [ways[pick][0] for ways, pick in zip(options, picks, strict=True)]
