"""Fused forwards of diffusers' Attention, with the module's parameters.

Each forward takes the module as `self`. It checks every call, as adapters, dropout and masks change between calls, and
raises CannotSwapError if the class's forward must run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_aigc.precision.block_options import BlockOptions
from lightning_aigc.precision.blocks.convolution import normalized
from lightning_aigc.precision.blocks.layers import (
    CannotSwapError,
    check_group_norm,
    check_same_dtype,
    class_path,
    read_layer_norm,
    read_projection,
    refuse_dropout,
    refuse_hooks,
    tensors_of,
)
from lightning_aigc.precision.context import options_of
from lightning_aigc.precision.memory import recompute
from lightning_aigc_kernels import LoRAProjection, NormParameters, lora_attention
from lightning_aigc_kernels.lora_attention.op import KEEPS

PROCESSORS = tuple(f"diffusers.models.attention_processor.{name}" for name in ("AttnProcessor2_0", "AttnProcessorNPU"))
LARGE_PRODUCT = 2e9
"""Operations of one sample's query projection from which `lean` saves a self-attention's key and value, and recomputes
the cross-attention instead, which is then cheap. SDXL at 1024 pixels needs 3.4e9, Stable Diffusion 1.5 at 512
0.8e9."""


def check_attention(self: Any) -> None:
    """Raise CannotSwapError unless this is a plain diffusers Attention with the default processor."""
    if class_path(self.processor) not in PROCESSORS:
        raise CannotSwapError(f"attention processor {type(self.processor).__name__}")
    for name in ("spatial_norm", "norm_cross", "norm_q", "norm_k", "to_add_out", "add_k_proj"):
        if getattr(self, name, None) is not None:
            raise CannotSwapError(f"attention with {name}")
    if self.is_causal or self.fused_projections or self.to_out is None or self.to_k is None:
        raise CannotSwapError("attention of another form")
    if self.to_k.in_features != self.to_v.in_features or self.inner_dim != self.inner_kv_dim:
        raise CannotSwapError("grouped key and value heads")


def check_attention_layers(self: Any) -> None:
    """Raise CannotSwapError if this attention with its current layers runs diffusers' forward."""
    attention_layers(self)
    if self.group_norm is not None:
        check_group_norm(self.group_norm)


def attention_layers(self: Any) -> tuple[LoRAProjection, LoRAProjection, LoRAProjection, LoRAProjection]:
    """Read the query, key, value and output projections of a diffusers Attention.

    Raises: CannotSwapError if the attention or a projection is not plain.
    """
    check_attention(self)
    refuse_dropout(self.to_out[1])
    return (*(read_projection(layer) for layer in (self.to_q, self.to_k, self.to_v, self.to_out[0])),)  # type: ignore[return-value]


def fused_attention(
    x: Tensor,
    context: Tensor | None,
    norm: NormParameters,
    layers: tuple[LoRAProjection, ...],
    heads: int,
    options: BlockOptions,
) -> Tensor:
    """Compute attention with its projections; `options` say what is saved and what is recomputed."""
    query, key, value, out = layers
    long = context is None and x.shape[1] >= recompute.LONG_ATTENTION_TOKENS
    y, attended = lora_attention(
        x, context, norm, query, key, value, out, heads, keeps=_saved_tensors(x, context, query, options),
        grad_dtype=options.grad_dtype, gradient_density=options.attention_grad_density,
        known=recompute.saved_attention() if long else None,
    )  # fmt: skip
    if long and attended is not None:
        recompute.save_attention(attended)
    return y


def _saved_tensors(
    x: Tensor, context: Tensor | None, query: LoRAProjection, options: BlockOptions
) -> int | frozenset[str] | tuple[str, ...]:
    """Return the tensors of an attention to save: how many of output, value and key, or their names."""
    if options.saved is not None:
        return options.saved.attn1 if context is None else options.saved.attn2
    if options.memory == "balanced":
        return 3
    if recompute.is_inside():
        # Backward reads a recomputed block's tensors at once, so nothing is computed a third time. A long attention was
        # saved by the first run, so its query, key and value are computed in backward alone.
        return 1 if context is None and x.shape[1] >= recompute.LONG_ATTENTION_TOKENS else tuple(KEEPS)
    large = 2 * x.shape[1] * query.weight.numel() >= LARGE_PRODUCT
    if options.memory != "lean" or not large:
        return 1
    return 3 if context is None else 0


def attention(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **cross_attention_kwargs: Any,
) -> Any:
    """Forward of an Attention outside a transformer block, over tokens or over a VAE's pixels with a GroupNorm."""
    if attention_mask is not None or any(value is not None for value in cross_attention_kwargs.values()):
        raise CannotSwapError("an attention mask or processor arguments")
    layers = attention_layers(self)
    norm = NormParameters(on=False)
    check_same_dtype(hidden_states, encoder_hidden_states, *tensors_of(layers, norm))
    if self.group_norm is not None:
        check_group_norm(self.group_norm)
    if hidden_states.dim() == 4 and encoder_hidden_states is not None:
        raise CannotSwapError("cross-attention of pixels")
    options = options_of(self)

    def run() -> Tensor:
        x = hidden_states
        if x.dim() == 3 and self.group_norm is not None:
            x = x.transpose(1, 2)
        if self.group_norm is not None:
            x = normalized(x, self.group_norm, options)
        if x.dim() == 4 or self.group_norm is not None:
            x = x.flatten(2).transpose(1, 2)
        y = fused_attention(x, encoder_hidden_states, norm, layers, self.heads, options)
        if hidden_states.dim() == 4:
            y = y.transpose(-1, -2).reshape(hidden_states.shape)
        y = y + hidden_states if self.residual_connection else y
        return y / self.rescale_output_factor if self.rescale_output_factor != 1 else y

    return run


def attention_part(
    self: Any, norm: nn.Module, x: Tensor, context: Tensor | None, mask: Tensor | None, options: BlockOptions
) -> Tensor:
    """Compute norm and attention inside a transformer block, by the module's own layers if the op cannot serve them."""
    try:
        if mask is not None:
            raise CannotSwapError("an attention mask")
        refuse_hooks(self)
        layers, layer_norm = attention_layers(self), read_layer_norm(norm)
        if self.group_norm is not None or self.residual_connection or self.rescale_output_factor != 1:
            raise CannotSwapError("attention of another form")
        check_same_dtype(x, context, *tensors_of(layers, layer_norm))
    except CannotSwapError:
        native: Tensor = self(norm(x), encoder_hidden_states=context, attention_mask=mask)
        return native
    return fused_attention(x, context, layer_norm, layers, self.heads, options)
