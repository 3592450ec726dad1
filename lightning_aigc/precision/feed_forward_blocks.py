"""Fused forwards of diffusers' gated FeedForward, with the module's parameters.

Each forward takes the module as `self` and falls back to the class's forward if the fused ops cannot serve the call.
This is checked at every call, because adapters are switched, dropout follows train and eval, and masks come with the
batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_aigc.precision.fused_forward import Choices, check_same_dtype, choices_of
from lightning_aigc.precision.layers import (
    CannotSwapError,
    class_path,
    read_layer_norm,
    read_projection,
    refuse_dropout,
    refuse_hooks,
    tensors_of,
)
from lightning_aigc_kernels import Norm, Projection, feed_forward

GATES = {"diffusers.models.activations.GEGLU": "gelu", "diffusers.models.activations.SwiGLU": "silu"}


def check_feed_forward(self: Any) -> None:
    """Raise CannotSwapError for a diffusers FeedForward that is not gated."""
    gate = self.net[0]
    if class_path(gate) not in GATES:
        raise CannotSwapError(f"feed-forward with {type(gate).__name__}")


def feed_forward_layers(self: Any) -> tuple[Projection, Projection, Any]:
    """The first and second projection and the gate's activation of a diffusers FeedForward.

    Raises: CannotSwapError if it is not gated or a layer is not plain.
    """
    check_feed_forward(self)
    gate, dropout, second, *rest = self.net
    refuse_hooks(gate)
    for layer in (dropout, *rest):
        refuse_dropout(layer)
    return read_projection(gate.proj), read_projection(second), GATES[class_path(gate)]


def gated(
    x: Tensor, norm: Norm, layers: tuple[Projection, Projection, Any], choices: Choices, skip_product: bool
) -> Tensor:
    """Gated feed-forward, saved and recomputed as `choices` say."""
    first, second, activation = layers
    keep_projection = choices.memory == "balanced" if choices.keeps is None else choices.keeps.projection
    return feed_forward(
        x, norm, first, second, activation, keep_projection=keep_projection,
        grad_dtype=choices.grad_dtype, skip_product=skip_product,
    )  # fmt: skip


def feed_forward_block(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Forward of a FeedForward outside a transformer block."""
    if args or kwargs.get("scale") is not None:
        raise CannotSwapError("arguments that diffusers deprecates")
    layers = feed_forward_layers(self)
    norm = Norm(on=False)
    check_same_dtype(hidden_states, *tensors_of(layers[:2], norm))
    choices = choices_of(self)
    return lambda: gated(hidden_states, norm, layers, choices, skip_product=False)


def feed_forward_part(self: Any, norm: nn.Module, x: Tensor, choices: Choices, skip_product: bool) -> Tensor:
    try:
        refuse_hooks(self)
        layers, layer_norm = feed_forward_layers(self), read_layer_norm(norm)
        check_same_dtype(x, *tensors_of(layers[:2], layer_norm))
    except CannotSwapError:
        native: Tensor = self(norm(x))
        return native
    return gated(x, layer_norm, layers, choices, skip_product)
