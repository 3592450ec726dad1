"""Pack an op's optional parameters into lists that a schema supports, and unpack their gradients.

torch.library tracks gradients through `Tensor[]` but not through `Tensor?[]` (torch 2.13). So an op takes a list of the
present parameters and a list of booleans that says which are present.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_aigc_kernels.dispatch import cast
from lightning_aigc_kernels.linear_with_lora import LoRAProjection
from lightning_aigc_kernels.normalization import NormParameters


def pack(tensors: Iterable[Tensor | None]) -> tuple[list[Tensor], list[bool]]:
    """Split optional tensors into the present tensors and flags of presence."""
    tensors = list(tensors)
    return [t for t in tensors if t is not None], [t is not None for t in tensors]


def unpack(packed: Sequence[Any], given: Sequence[bool], absent: Any = None) -> list[Any]:
    """Undo `pack` for the tensors or for values per tensor, with `absent` in the other places."""
    if len(packed) == len(given):
        return list(packed)
    values = iter(packed)
    return [next(values) if is_given else absent for is_given in given]


def pack_layers(norm: NormParameters, layers: Sequence[LoRAProjection]) -> tuple[list[Tensor], list[bool], list[float]]:
    """Pack the tensors of a norm and of linear layers; also returns the layers' LoRA scales."""
    tensors = [norm.weight, norm.bias]
    for layer in layers:
        tensors += layer.tensors
    return *pack(tensors), [layer.scale for layer in layers]


def unpack_layers(
    parameters: Sequence[Tensor], given: Sequence[bool], normed: bool, eps: float, scales: Sequence[float]
) -> tuple[NormParameters, list[LoRAProjection]]:
    """Undo `pack_layers`."""
    norm_weight, norm_bias, *tensors = unpack(parameters, given)
    layers = []
    for i, scale in enumerate(scales):
        weight, bias, down, up = tensors[4 * i : 4 * i + 4]
        layers.append(LoRAProjection(weight, bias, down, up, scale))
    return NormParameters(norm_weight, norm_bias, eps, normed), layers


def wanted(
    gradients: Iterable[Tensor | None], parameters: Iterable[Tensor | None], needs: Iterable[bool]
) -> list[Tensor]:
    """The needed gradients, each in its parameter's dtype."""
    return [
        cast(gradient, parameter.dtype)
        for gradient, parameter, need in zip(gradients, parameters, needs, strict=True)
        if need and gradient is not None and parameter is not None
    ]


def empty_wanted(parameters: Iterable[Tensor | None], needs: Iterable[bool]) -> list[Tensor]:
    """Empty tensors like the result of `wanted`, for a fake kernel."""
    pairs = zip(parameters, needs, strict=True)
    return [parameter.new_empty(parameter.shape) for parameter, need in pairs if need and parameter is not None]


def spread(gradients: Iterator[Tensor], needs: Iterable[bool]) -> list[Tensor | None]:
    """Undo `wanted`: the needed gradients in their places, None elsewhere."""
    return [next(gradients) if need else None for need in needs]
