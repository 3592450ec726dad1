"""Linear layer with optional LoRA, forward and backward without autograd, as a building block of larger ops.

Dimensions: T tokens, C input features, D output features, R the LoRA's rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.dispatch import cast, cast_optional
from lightning_aigc_kernels.matmul import add_matmul_, linear, matmul


class LoRAProjection(NamedTuple):
    """The tensors of a linear layer with optional LoRA: y = x weight^T + bias + scale * (x down^T) up^T."""

    weight: Tensor
    """[D, C]"""
    bias: Tensor | None = None
    """[D]"""
    down: Tensor | None = None
    """[R, C], peft's lora_A; None without LoRA"""
    up: Tensor | None = None
    """[D, R], peft's lora_B"""
    scale: float = 0.0
    """lora_alpha / R, or the LoRA variant's scale"""

    def to(self, dtype: torch.dtype) -> LoRAProjection:
        """The layer in another dtype, without a copy if it has that dtype already."""
        weight, bias, down, up, scale = self
        if weight.dtype is dtype and all(t is None or t.dtype is dtype for t in (bias, down, up)):
            return self
        bias, down, up = (cast_optional(t, dtype) for t in (bias, down, up))
        return LoRAProjection(cast(weight, dtype), bias, down, up, scale)

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The tensors for an op's schema, which takes the scale separately."""
        return self.weight, self.bias, self.down, self.up


class ProjectionGradients(NamedTuple):
    """Gradients in the order of a LoRAProjection's tensors, None if not needed."""

    weight: Tensor | None
    bias: Tensor | None
    down: Tensor | None
    up: Tensor | None


class Needs(NamedTuple):
    """Flags: the tensors of a LoRAProjection that need a gradient."""

    weight: bool
    bias: bool
    down: bool
    up: bool


def inner(x_TC: Tensor, layer: LoRAProjection) -> Tensor | None:
    """LoRA's inner tensor x down^T [T, R], unscaled; None without LoRA."""
    return None if layer.down is None else linear(x_TC, layer.down, None)


def inner_gradient(dy_TD: Tensor, layer: LoRAProjection) -> Tensor | None:
    """The gradient of LoRA's inner tensor [T, R], unscaled; None without LoRA."""
    return None if layer.up is None else matmul(dy_TD, layer.up)


def project(x_TC: Tensor, layer: LoRAProjection, inner_TR: Tensor | None = None) -> Tensor:
    """The layer's output y_TD; `inner_TR` is `inner`'s result, if the caller has it."""
    y_TD = linear(x_TC, layer.weight, layer.bias)
    if layer.down is not None and layer.up is not None:
        inner_TR = linear(x_TC, layer.down, None) if inner_TR is None else inner_TR
        add_matmul_(y_TD, inner_TR, layer.up.t(), layer.scale)
    return y_TD


def add_input_gradient(
    dx_TC: Tensor | None, dy_TD: Tensor, layer: LoRAProjection, dinner_TR: Tensor | None = None
) -> Tensor:
    """Add this layer's input gradient to dx, accumulated inside the matrix products.

    Args: dinner_TR is `inner_gradient`'s result, if the caller has it.
    """
    dx_TC = matmul(dy_TD, layer.weight) if dx_TC is None else add_matmul_(dx_TC, dy_TD, layer.weight)
    if layer.down is not None and layer.up is not None:
        dinner_TR = matmul(dy_TD, layer.up) if dinner_TR is None else dinner_TR
        add_matmul_(dx_TC, dinner_TR, layer.down, layer.scale)
    return dx_TC


def parameter_gradients(
    dy_TD: Tensor,
    x_TC: Tensor,
    layer: LoRAProjection,
    needs: Needs,
    inner_TR: Tensor | None = None,
    dinner_TR: Tensor | None = None,
) -> ProjectionGradients:
    """The gradients of weight, bias, down and up that are needed.

    Args: inner_TR and dinner_TR are the results of `inner` and `inner_gradient`, if the caller has them.
    """
    ddown_RC = dup_DR = None
    if layer.down is not None and layer.up is not None:
        if needs.down:
            dinner_TR = matmul(dy_TD, layer.up) if dinner_TR is None else dinner_TR
            ddown_RC = matmul(_scaled(dinner_TR, layer.scale).t(), x_TC)
        if needs.up:
            inner_TR = linear(x_TC, layer.down, None) if inner_TR is None else inner_TR
            dup_DR = matmul(dy_TD.t(), _scaled(inner_TR, layer.scale))
    dweight_DC = matmul(dy_TD.t(), x_TC) if needs.weight else None
    dbias_D = dy_TD.sum(0) if needs.bias and layer.bias is not None else None
    return ProjectionGradients(dweight_DC, dbias_D, ddown_RC, dup_DR)


def _scaled(x: Tensor, scale: float) -> Tensor:
    """x * scale, and x itself for 1, the usual lora_alpha / R."""
    return x if scale == 1.0 else x.mul(scale)


def linear_with_lora(x: Tensor, layer: LoRAProjection) -> Tensor:
    """Compute x weight^T + bias + scale * (x down^T) up^T with torch's autograd, for references."""
    y = F.linear(x, layer.weight, layer.bias)
    if layer.down is None or layer.up is None:
        return y
    return y + F.linear(F.linear(x, layer.down), layer.up) * layer.scale
