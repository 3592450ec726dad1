"""Fused forwards of diffusers' Transformer2DModel and BasicTransformerBlock, with the module's parameters.

Each forward takes the module as `self`. It checks every call, as adapters, dropout and masks change between calls, and
raises CannotSwapError if the class's forward must run.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

from lightning_aigc.precision.blocks.attention import attention_layers, attention_part
from lightning_aigc.precision.blocks.convolution import norm_act_conv, normalized
from lightning_aigc.precision.blocks.feed_forward import feed_forward_layers, feed_forward_part
from lightning_aigc.precision.blocks.layers import (
    CannotSwapError,
    check_group_norm,
    check_same_dtype,
    read_layer_norm,
    refuse_hooks,
)
from lightning_aigc.precision.context import child_options, options_of
from lightning_aigc.precision.memory import recompute


def check_transformer_block(self: Any) -> None:
    """Raise CannotSwapError unless this diffusers BasicTransformerBlock is built as in Stable Diffusion."""
    if self.norm_type != "layer_norm" or self.pos_embed is not None or self.only_cross_attention:
        raise CannotSwapError(f"norm_type {self.norm_type}, positional embeddings or cross-attention alone")
    if self._chunk_size is not None:
        raise CannotSwapError("a feed-forward in chunks")


def check_transformer_block_layers(self: Any) -> None:
    """Raise CannotSwapError for a norm that the fused ops do not support, or if no part of the block can be fused."""
    parts = [(self.norm1, self.attn1, attention_layers), (self.norm3, self.ff, feed_forward_layers)]
    if self.attn2 is not None:
        parts.insert(1, (self.norm2, self.attn2, attention_layers))
    for norm, _, _ in parts:
        read_layer_norm(norm)
    for _, part, read in parts:
        with contextlib.suppress(CannotSwapError):
            read(part)
            return
    raise CannotSwapError("each of its parts is left alone")


def transformer_block(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    timestep: Tensor | None = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: Tensor | None = None,
    added_cond_kwargs: dict[str, Tensor] | None = None,
) -> Any:
    """Forward of BasicTransformerBlock: self-attention, cross-attention and feed-forward with their norms."""
    check_transformer_block(self)
    if cross_attention_kwargs or hidden_states.dim() != 3:
        raise CannotSwapError("processor arguments")
    options = options_of(self)

    def run(x: Tensor, context: Tensor | None) -> Tensor:
        if options.recomputes:
            recompute.mark_unread(self)
        x = x + attention_part(self.attn1, self.norm1, x, None, attention_mask, options.for_part("attn1"))
        if self.attn2 is not None:
            mask = encoder_attention_mask
            x = x + attention_part(self.attn2, self.norm2, x, context, mask, options.for_part("attn2"))
        skip = recompute.is_unread(self)
        return x + feed_forward_part(self.ff, self.norm3, x, options.for_part("ff"), skip_product=skip)

    if options.recomputes:
        return lambda: recompute.checkpoint_block(self, run, hidden_states, encoder_hidden_states)
    return lambda: run(hidden_states, encoder_hidden_states)


# Transformer2DModel: the norm and projections around its blocks


def check_transformer(self: Any) -> None:
    """Raise CannotSwapError unless this diffusers Transformer2DModel takes pixels, as Stable Diffusion's do."""
    if not self.is_input_continuous:
        raise CannotSwapError("an input that is not pixels")
    check_group_norm(self.norm)


def transformer(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    timestep: Tensor | None = None,
    added_cond_kwargs: dict[str, Tensor] | None = None,
    class_labels: Tensor | None = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    attention_mask: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    return_dict: bool = True,
) -> Any:
    """Forward of Transformer2DModel: GroupNorm and projection save one tensor, and no copy turns pixels into tokens."""
    check_transformer(self)
    if return_dict or cross_attention_kwargs or attention_mask is not None or encoder_attention_mask is not None:
        raise CannotSwapError("a named output, processor arguments or masks")
    if self.gradient_checkpointing:
        raise CannotSwapError("gradient checkpointing")
    check_same_dtype(hidden_states, self.norm.weight)
    options = options_of(self)
    around = options.for_part("norm")

    def run(x: Tensor, context: Tensor | None) -> Tensor:
        height, width = x.shape[2:]
        if options.recomputes and _blocks_are_unread(self):
            recompute.mark_unread(*self.transformer_blocks, self.proj_out)
        if self.use_linear_projection:
            tokens = self.proj_in(normalized(x, self.norm, around).permute(0, 2, 3, 1).flatten(1, 2))
        else:
            tokens = norm_act_conv(x, self.norm, self.proj_in, around, silu=False).permute(0, 2, 3, 1).flatten(1, 2)
        for block in self.transformer_blocks:
            with child_options(block, options.saved):
                tokens = block(tokens, encoder_hidden_states=context, timestep=timestep, class_labels=class_labels)
        if self.use_linear_projection:
            tokens = self.proj_out(tokens)
        pixels: Tensor = tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2)
        return x + (pixels if self.use_linear_projection else self.proj_out(pixels))

    if options.recomputes:
        return lambda: (recompute.checkpoint_block(self, run, hidden_states, encoder_hidden_states),)
    return lambda: (run(hidden_states, encoder_hidden_states),)


def _blocks_are_unread(self: Any) -> bool:
    """Whether backward reads no output of the blocks, because the last projection is plain and frozen."""
    try:
        for layer in (*self.transformer_blocks, self.proj_out):
            refuse_hooks(layer)
    except CannotSwapError:
        return False
    plain = type(self.proj_out) in (nn.Linear, nn.Conv2d)
    return plain and not any(p.requires_grad for p in self.proj_out.parameters())
