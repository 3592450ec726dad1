"""The optional tensors around a norm, which both ops of this folder share: z = norm(x) * slope + offset.

modulated_norm: slope = weight * (1 + scale), offset = bias * (1 + scale) + shift.
gated_residual: slope = weight * gate, with the gate in the scale's place.
Slope and offset are one row a sample, without a token axis.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

NormKind = Literal["layer", "rms"]
NORMS = ("layer", "rms", "none")


class Modulation(NamedTuple):
    """The tensors and the options; an absent tensor is None."""

    scale: Tensor | None
    shift: Tensor | None
    """[N, C], as the scale."""
    weight: Tensor | None
    bias: Tensor | None
    """[C], as the weight."""
    norm: str
    """One of NORMS."""
    eps: float
    one_plus: bool
    """Whether the slope has 1 + scale; else it has the scale itself, which is a gate."""

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Scale, shift, weight and bias."""
        return self.scale, self.shift, self.weight, self.bias

    def sums(self, needs: Needs) -> tuple[bool, bool]:
        """Whether the needed gradients read a sample's sums over tokens of dy * norm(x), and those of dy."""
        return needs.scale or needs.weight, needs.shift or needs.bias or (needs.scale and self.bias is not None)


class Needs(NamedTuple):
    """Flags: the tensors that need a gradient."""

    x: bool
    scale: bool = False
    shift: bool = False
    weight: bool = False
    bias: bool = False


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, scale, shift, weight and bias."""


def check_tokens(op: str, x: Tensor) -> None:
    """Raise ValueError unless x is [N, T, C]."""
    if x.dim() != 3:
        raise ValueError(f"{op} wants x [N, T, C], got {tuple(x.shape)}")


def check_channels(name: str, tensor_C: Tensor | None, x_NTC: Tensor) -> None:
    """Raise ValueError unless the tensor is absent or [C]."""
    if tensor_C is not None and tensor_C.shape != x_NTC.shape[2:]:
        wanted = f"({x_NTC.shape[2]},) for x {tuple(x_NTC.shape)}"
        raise ValueError(f"{name} must be {wanted}, got {tuple(tensor_C.shape)}")


def row_of_each_sample(name: str, tensor: Tensor | None, x_NTC: Tensor) -> Tensor | None:
    """View [N, C] or [N, 1, C] as [N, C]; a single sample's row serves all samples of x.

    Raises: ValueError for another shape, such as a row of each token.
    """
    if tensor is None:
        return None
    samples, _, channels = x_NTC.shape
    rows = tensor.squeeze(1) if tensor.dim() == 3 and tensor.shape[1] == 1 else tensor
    if rows.dim() != 2 or rows.shape[0] not in (1, samples) or rows.shape[1] != channels:
        wanted = f"{(samples, channels)} or {(samples, 1, channels)} for x {tuple(x_NTC.shape)}"
        raise ValueError(f"{name} must be {wanted}, got {tuple(tensor.shape)}; a row of each token is not supported")
    return rows if rows.shape[0] == samples else rows.expand(samples, channels)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x's sums: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)
