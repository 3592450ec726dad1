"""A linear layer with or without LoRA, forward and backward on plain matrices, for larger ops.

Dimensions: T tokens, C input features, D output features, R the LoRA's rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_aigc_kernels.matmul import add_matmul_, linear, matmul


class Projection(NamedTuple):
    """y = x weight^T + bias + scale * (x down^T) up^T."""

    weight: Tensor
    """[D, C]"""
    bias: Tensor | None = None
    """[D]"""
    down: Tensor | None = None
    """[R, C], peft's lora_A; None without LoRA"""
    up: Tensor | None = None
    """[D, R], peft's lora_B"""
    scale: float = 0.0
    """lora_alpha / R, or what the LoRA variant makes of it"""

    def to(self, dtype: torch.dtype) -> Projection:
        """Return the layer in another dtype; nothing is copied where it has it."""
        if all(t is None or t.dtype == dtype for t in self.tensors):  # a fraction of four calls to Tensor.to
            return self
        bias, down, up = (None if t is None else t.to(dtype) for t in self[1:4])
        return Projection(self.weight.to(dtype), bias, down, up, self.scale)

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What an op's schema carries; the scale goes apart."""
        return self.weight, self.bias, self.down, self.up


class ProjectionGradients(NamedTuple):
    """Gradients in the order of a Projection's tensors, None where not needed."""

    weight: Tensor | None
    bias: Tensor | None
    down: Tensor | None
    up: Tensor | None


class Needs(NamedTuple):
    """Which of a Projection's tensors need a gradient."""

    weight: bool
    bias: bool
    down: bool
    up: bool


def project(x_TC: Tensor, layer: Projection) -> Tensor:
    """y_TD."""
    y_TD = linear(x_TC, layer.weight, layer.bias)
    if layer.down is not None and layer.up is not None:
        add_matmul_(y_TD, matmul(x_TC, layer.down.t()), layer.up.t(), layer.scale)
    return y_TD


def add_input_gradient(dx_TC: Tensor | None, dy_TD: Tensor, layer: Projection) -> Tensor:
    """Add this layer's input gradient to dx; the sum grows inside the matrix products."""
    dx_TC = matmul(dy_TD, layer.weight) if dx_TC is None else add_matmul_(dx_TC, dy_TD, layer.weight)
    if layer.down is not None and layer.up is not None:
        add_matmul_(dx_TC, matmul(dy_TD, layer.up), layer.down, layer.scale)
    return dx_TC


def parameter_gradients(dy_TD: Tensor, x_TC: Tensor, layer: Projection, needs: Needs) -> ProjectionGradients:
    """Gradients of weight, bias, down and up from the layer's input."""
    ddown_RC = dup_DR = None
    if layer.down is not None and layer.up is not None:
        if needs.down:
            ddown_RC = matmul(matmul(dy_TD, layer.up).mul_(layer.scale).t(), x_TC)
        if needs.up:
            dup_DR = matmul(dy_TD.t(), matmul(x_TC, layer.down.t()).mul_(layer.scale))
    dweight_DC = matmul(dy_TD.t(), x_TC) if needs.weight else None
    dbias_D = dy_TD.sum(0) if needs.bias and layer.bias is not None else None
    return ProjectionGradients(dweight_DC, dbias_D, ddown_RC, dup_DR)
