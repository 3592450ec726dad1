"""Choose the format of each frozen weight within a budget of bytes, so that the model's output changes least.

To first order a weight's rounding error d changes the output by its Jacobian J times d. Rounding errors of neighbours
are independent, so the expected squared length is the sum of |J_i|^2 d_i^2 over the weight's numbers. The gradient of a
random +1/-1 combination of the outputs has the expected square |J_i|^2 (Hutchinson's estimator), and one backward gives
it for all layers at once.

Legend: B blocks of 64 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_aigc.errors import ConfigError, ModelError
from lightning_aigc.knapsack import Way, choose
from lightning_aigc.quantization.layers import MIB, Layer, Packing
from lightning_aigc_kernels.packed_weight import Format, PackedWeight, packed_bytes
from lightning_aigc_kernels.packed_weight.reference import BLOCK

FORMATS_TRIED: tuple[Format, ...] = ("int8", "nf4")
Errors = list[dict[Format, float]]
"""Expected squared error of the output over its squared length, by format, for each layer."""


def output_errors(layers: Sequence[Layer], outputs: Iterable[Tensor], packing: Packing | None = None) -> Errors:
    """Estimate the output error of quantizing each layer in each format, measured on these outputs of the model.

    Args: outputs: Computed lazily, with gradients on, from latents of real images.
    """
    result: Errors = []
    for layer, sensitivity_B in zip(layers, squared_gradients(layers, outputs), strict=True):
        weight, errors = layer.weight, {}
        for kind in FORMATS_TRIED:
            packed = packing(layer, kind) if packing is not None else PackedWeight.pack(weight, kind)
            errors[kind] = float((rounding_errors(weight, packed) * sensitivity_B).sum())
        result.append(errors)
    return result


def choose_formats(
    layers: Sequence[Layer], errors: Errors, target_bytes: float, other_bytes: int
) -> list[Format | None]:
    """Choose a format for each layer, or None for full precision, with the least output error within a budget.

    Args: other_bytes: Bytes of the rest of the base, which count towards `target_bytes`.
    Raises: ConfigError for a budget that cannot be met, or one that needs no quantization.
    """
    options: list[list[tuple[Format | None, Way]]] = []
    for layer, by_format in zip(layers, errors, strict=True):
        numel = layer.weight.numel()
        packed = [(kind, (float(packed_bytes(numel, kind)), error)) for kind, error in by_format.items()]
        options.append([(None, (float(layer.weight.nbytes), 0.0)), *packed])
    unquantized = other_bytes + sum(costs[0][1][0] for costs in options)
    if target_bytes >= unquantized:
        raise ConfigError(
            f"base_quantization: {{target_mib: {target_bytes / MIB:g}}} quantizes nothing: these weights fit in full"
            f" precision, in {unquantized / MIB:.4g} MiB; leave base_quantization unset, or ask for"
            f" less than {unquantized / MIB:.4g}"
        )
    picks = choose([[cost for _, cost in costs] for costs in options], target_bytes - other_bytes)
    if picks is None:
        least = other_bytes + sum(min(nbytes for _, (nbytes, _) in costs) for costs in options)
        digits = 1 if least >= MIB else 4  # a small base has its whole range within a tenth
        wanted = math.ceil(10**digits * least / MIB) / 10**digits
        raise ConfigError(
            f"base_quantization: {{target_mib: {target_bytes / MIB:g}}} cannot be met: with every weight in 4 bits the"
            f" base has {least / MIB:.4g} MiB; ask for {wanted:g} or more"
        )
    return [costs[pick][0] for costs, pick in zip(options, picks, strict=True)]


def squared_gradients(layers: Sequence[Layer], outputs: Iterable[Tensor], seed: int = 0) -> list[Tensor]:
    """Estimate the output's sensitivity to each block of each layer's weight, float32 [B] on the CPU.

    It is the sum over a block of |J_i|^2, over the squared length of the output, averaged over the outputs. Each
    gradient is freed once backward has computed it, so the peak is one weight above a backward through frozen weights.

    Args: outputs: Computed lazily, with gradients on.
    Raises: ModelError for an output that is not finite, or zero.
    """
    weights = {id(layer.weight): layer.weight for layer in layers}
    sums = {key: torch.zeros(-(-weight.numel() // BLOCK)) for key, weight in weights.items()}

    def collect(weight: Tensor) -> None:
        assert weight.grad is not None
        sums[id(weight)] += _sum_blocks(weight.grad.float().square()).cpu()
        weight.grad = None

    handles = []
    generator = torch.Generator().manual_seed(seed)
    count = 0
    try:
        for weight in weights.values():
            weight.requires_grad_(True)
            handles.append(weight.register_post_accumulate_grad_hook(collect))  # type: ignore[no-untyped-call]
        with torch.enable_grad():
            for output in outputs:
                length = float(output.detach().float().norm())
                if not 0 < length < float("inf"):
                    raise ModelError(
                        f"the base's output has the length {length:g}, so its quantization error cannot be measured;"
                        " load the base again, or set base_quantization: int8"
                    )
                signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
                # Divided by its length the output's gradients stay far from the ends of float16.
                combination = (output * (signs.to(output) / length)).sum()
                combination.backward(inputs=list(weights.values()))  # type: ignore[no-untyped-call]
                count += 1
    finally:
        for handle in handles:
            handle.remove()
        for weight in weights.values():
            weight.requires_grad_(False)
            weight.grad = None
    return [sums[id(layer.weight)] / max(count, 1) for layer in layers]


def rounding_errors(weight: Tensor, packed: PackedWeight) -> Tensor:
    """Compute the mean squared rounding error of each block of a packed weight, float32 [B] on the CPU."""
    rounded = packed.dequantize().float()
    return _sum_blocks((rounded - weight.detach().float()).square()).cpu() / BLOCK


def _sum_blocks(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    missing = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK).sum(1)
