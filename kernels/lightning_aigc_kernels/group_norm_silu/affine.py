"""The affine tensors of GroupNorm with SiLU: weight, bias, and the timestep's scale and shift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_aigc_kernels.dispatch import KERNEL_DTYPES


class NormSiLU(NamedTuple):
    """The optional tensors and the options of act(GroupNorm(x) * (1 + scale) + shift)."""

    weight: Tensor | None
    bias: Tensor | None
    """[C], as the weight."""
    scale: Tensor | None
    shift: Tensor | None
    """[N, C], as the scale."""
    groups: int
    eps: float
    silu: bool

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Weight, bias, scale and shift."""
        return self.weight, self.bias, self.scale, self.shift


@dataclass(frozen=True)
class Affine:
    """The tensors for the kernels, with ones and zeros for absent tensors, whose gradients are ignored."""

    weight: Tensor
    bias: Tensor
    """[C], as the weight."""
    modulation: tuple[Tensor, ...]
    """The timestep's scale and shift, both [N, C]; or empty."""

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """The tensors in the kernels' order; without modulation the last two are not read."""
        return self.weight, self.bias, *(self.modulation or (self.weight, self.bias))

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between two samples' scales and between their shifts."""
        return tuple(tensor.stride(0) for tensor in self.modulation) or (0, 0)


def affine_of(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None
) -> Affine:
    """Build the kernels' Affine. Raises: ValueError for a shape or dtype that the kernels do not support."""
    samples, channels = x.shape[:2]
    for name, tensor in {"weight": weight, "bias": bias, "scale": scale, "shift": shift}.items():
        shape = (channels,) if name in ("weight", "bias") else (samples, channels)
        if tensor is not None and (tensor.shape != shape or tensor.dtype not in KERNEL_DTYPES):
            wanted = f"float32, float16 or bfloat16 of shape {shape}"
            raise ValueError(f"{name} must be {wanted}, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    weight = x.new_ones(channels) if weight is None else weight.contiguous()
    bias = x.new_zeros(channels) if bias is None else bias.contiguous()
    if scale is None and shift is None:
        return Affine(weight, bias, ())
    modulation = (x.new_zeros(samples, channels) if given is None else _rows(given) for given in (scale, shift))
    return Affine(weight, bias, tuple(modulation))


def _rows(of_samples_NC: Tensor) -> Tensor:
    """Return the tensor with contiguous rows; half of a wider tensor qualifies without a copy."""
    return of_samples_NC if of_samples_NC.stride(1) == 1 else of_samples_NC.contiguous()
