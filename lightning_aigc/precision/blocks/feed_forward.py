"""Fused forwards of diffusers' gated FeedForward, with the module's parameters.

Each forward takes the module as `self`. It checks every call, as adapters, dropout and masks change between calls, and
raises CannotSwapError if the class's forward must run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_aigc.precision.block_options import BlockOptions
from lightning_aigc.precision.blocks.layers import (
    CannotSwapError,
    check_same_dtype,
    class_path,
    read_layer_norm,
    read_projection,
    refuse_dropout,
    refuse_hooks,
    tensors_of,
)
from lightning_aigc.precision.context import options_of
from lightning_aigc_kernels import LoRAProjection, NormParameters, feed_forward

GATES = {"diffusers.models.activations.GEGLU": "gelu", "diffusers.models.activations.SwiGLU": "silu"}


def check_feed_forward(self: Any) -> None:
    """Raise CannotSwapError for a diffusers FeedForward that is not gated."""
    gate = self.net[0]
    if class_path(gate) not in GATES:
        raise CannotSwapError(f"feed-forward with {type(gate).__name__}")


def feed_forward_layers(self: Any) -> tuple[LoRAProjection, LoRAProjection, Any]:
    """Read the first and second projection and the gate's activation of a diffusers FeedForward.

    Raises: CannotSwapError if it is not gated or a layer is not plain.
    """
    check_feed_forward(self)
    gate, dropout, second, *rest = self.net
    refuse_hooks(gate)
    for layer in (dropout, *rest):
        refuse_dropout(layer)
    return read_projection(gate.proj), read_projection(second), GATES[class_path(gate)]


def fused_feed_forward(
    x: Tensor,
    norm: NormParameters,
    layers: tuple[LoRAProjection, LoRAProjection, Any],
    options: BlockOptions,
    skip_product: bool,
) -> Tensor:
    """Compute a gated feed-forward; `options` say what is saved and what is recomputed."""
    first, second, activation = layers
    saves_projection = options.memory == "balanced" if options.saved is None else options.saved.projection
    return feed_forward(
        x, norm, first, second, activation, keep_projection=saves_projection,
        grad_dtype=options.grad_dtype, skip_product=skip_product,
    )  # fmt: skip


def feed_forward_block(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Forward of a FeedForward outside a transformer block."""
    if args or kwargs.get("scale") is not None:
        raise CannotSwapError("arguments that diffusers deprecates")
    layers = feed_forward_layers(self)
    norm = NormParameters(on=False)
    check_same_dtype(hidden_states, *tensors_of(layers[:2], norm))
    options = options_of(self)
    return lambda: fused_feed_forward(hidden_states, norm, layers, options, skip_product=False)


def feed_forward_part(self: Any, norm: nn.Module, x: Tensor, options: BlockOptions, skip_product: bool) -> Tensor:
    """Compute norm and feed-forward inside a block, by the module's own layers if the op cannot serve them."""
    try:
        refuse_hooks(self)
        layers, layer_norm = feed_forward_layers(self), read_layer_norm(norm)
        check_same_dtype(x, *tensors_of(layers[:2], layer_norm))
    except CannotSwapError:
        native: Tensor = self(norm(x))
        return native
    return fused_feed_forward(x, layer_norm, layers, options, skip_product)
