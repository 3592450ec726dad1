"""How far packing each layer moves a model's output, from gradients of a few outputs and each layer's own rounding.

To first order a weight's rounding error d moves the output by its Jacobian J times d. Rounding errors of neighbours are
independent, so the expected squared length is the sum of |J_i|^2 d_i^2 over the weight's numbers. The gradient of a
random +1/-1 combination of the outputs has the expected square |J_i|^2 (Hutchinson's estimator), and one backward gives
it for all layers at once.

Legend: B blocks of 64 numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_aigc.errors import ModelError
from lightning_aigc.quantization.layers import Layer
from lightning_aigc_kernels.packed_weight import PackedWeight
from lightning_aigc_kernels.packed_weight.reference import BLOCK


def squared_gradients(layers: Sequence[Layer], outputs: Iterable[Tensor], seed: int = 0) -> list[Tensor]:
    """For each layer, the output's sensitivity to each block of its weight, float32 [B] on the CPU.

    The sum over a block of |J_i|^2, over the squared length of the output, averaged over the outputs. A gradient is
    freed as soon as backward has made it, so the peak is one weight above that of a backward through frozen weights.

    Args: outputs: each is computed when it is asked for, with gradients on.
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
                        f"the base's output has the length {length:g}, so the error of packing it cannot be measured;"
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
    """The mean squared rounding error of each block of a packed weight, float32 [B] on the CPU."""
    rounded = packed.dequantize().float()
    return _sum_blocks((rounded - weight.detach().float()).square()).cpu() / BLOCK


def _sum_blocks(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    missing = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK).sum(1)
