"""Forward passes of attentions, feed-forwards and transformers through the fused ops, with their own parameters.

Each forward takes the module as `self`, asks first whether the fused ops can serve this call, and else runs the class's
own. Whether they can is asked at every call, because adapters are switched, dropout follows train and eval, and masks
come with the batch.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

from lightning_aigc.precision import recompute
from lightning_aigc.precision.convolution_blocks import norm_act_conv, normalized
from lightning_aigc.precision.fused_forward import Choices, check_same_dtype, choices_of
from lightning_aigc.precision.layers import (
    CannotSwapError,
    check_group_norm,
    class_path,
    read_layer_norm,
    read_projection,
    refuse_dropout,
    refuse_hooks,
)
from lightning_aigc_kernels.feed_forward import feed_forward
from lightning_aigc_kernels.linear_with_lora import Projection
from lightning_aigc_kernels.lora_attention import lora_attention
from lightning_aigc_kernels.normalization import Norm

ATTENTION = "diffusers.models.attention_processor.Attention"
PROCESSORS = tuple(f"diffusers.models.attention_processor.{name}" for name in ("AttnProcessor2_0", "AttnProcessorNPU"))
GATES = {"diffusers.models.activations.GEGLU": "gelu", "diffusers.models.activations.SwiGLU": "silu"}

LARGE_PRODUCT = 2e9
"""Operations of one sample's query from which on `lean` keeps a self-attention's key and value, and repeats the
attention to a text, a small one then, in their place. SDXL's take 3.4e9 at 1024 pixels, Stable Diffusion 1.5's 0.8e9
at 512."""


def check_attention(self: Any) -> None:
    """Raises: CannotSwapError unless this diffusers Attention is a plain one under the default processor."""
    if class_path(self.processor) not in PROCESSORS:
        raise CannotSwapError(f"attention processor {type(self.processor).__name__}")
    for name in ("spatial_norm", "norm_cross", "norm_q", "norm_k", "to_add_out", "add_k_proj"):
        if getattr(self, name, None) is not None:
            raise CannotSwapError(f"attention with {name}")
    if self.is_causal or self.fused_projections or self.to_out is None or self.to_k is None:
        raise CannotSwapError("attention of another form")
    if self.to_k.in_features != self.to_v.in_features or self.inner_dim != self.inner_kv_dim:
        raise CannotSwapError("grouped key and value heads")


def check_attention_now(self: Any) -> None:
    """Raises: CannotSwapError where this attention, as its layers are now, runs as diffusers wrote it."""
    attention_layers(self)
    if self.group_norm is not None:
        check_group_norm(self.group_norm)


def attention_layers(self: Any) -> tuple[Projection, Projection, Projection, Projection]:
    """The four projections of a diffusers Attention.

    Raises: CannotSwapError when it or one of them is not plain.
    """
    check_attention(self)
    refuse_dropout(self.to_out[1])
    return (*(read_projection(layer) for layer in (self.to_q, self.to_k, self.to_v, self.to_out[0])),)  # type: ignore[return-value]


def _tensors(layers: tuple[Projection, ...], norm: Norm) -> list[Tensor | None]:
    return [t for layer in layers for t in layer.tensors] + [norm.weight, norm.bias]


def attend(
    x: Tensor, context: Tensor | None, norm: Norm, layers: tuple[Projection, ...], heads: int, choices: Choices
) -> Tensor:
    """One attention with its projections, kept and repeated as chosen."""
    query, key, value, out = layers
    long = context is None and x.shape[1] >= recompute.LONG_ATTENTION_TOKENS
    y, made = lora_attention(
        x, context, norm, query, key, value, out, heads, keeps=_attention_keeps(x, context, query, choices),
        grad_dtype=choices.grad_dtype, gradient_density=choices.attention_grad_density,
        known=recompute.recall() if long else None,
    )  # fmt: skip
    if long and made is not None:
        recompute.remember(made)
    return y


def _attention_keeps(x: Tensor, context: Tensor | None, query: Projection, choices: Choices) -> int:
    """How many of an attention's output, value and key are kept."""
    if choices.memory == "balanced":
        return 3
    large = 2 * x.shape[1] * query.weight.numel() >= LARGE_PRODUCT
    if choices.memory != "lean" or not large:
        return 1
    return 3 if context is None else 0


def attention(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **cross_attention_kwargs: Any,
) -> Any:
    """An Attention that stands alone: of tokens, or of a VAE's pixels with its GroupNorm and residual."""
    if attention_mask is not None or any(value is not None for value in cross_attention_kwargs.values()):
        raise CannotSwapError("an attention mask or processor arguments")
    layers = attention_layers(self)
    norm = Norm(on=False)
    check_same_dtype(hidden_states, encoder_hidden_states, *_tensors(layers, norm))
    if self.group_norm is not None:
        check_group_norm(self.group_norm)
    if hidden_states.dim() == 4 and encoder_hidden_states is not None:
        raise CannotSwapError("cross-attention of pixels")
    choices = choices_of(self)

    def run() -> Tensor:
        x = hidden_states
        if x.dim() == 3 and self.group_norm is not None:
            x = x.transpose(1, 2)
        if self.group_norm is not None:
            x = normalized(x, self.group_norm, choices)
        if x.dim() == 4 or self.group_norm is not None:
            x = x.flatten(2).transpose(1, 2)
        y = attend(x, encoder_hidden_states, norm, layers, self.heads, choices)
        if hidden_states.dim() == 4:
            y = y.transpose(-1, -2).reshape(hidden_states.shape)
        y = y + hidden_states if self.residual_connection else y
        return y / self.rescale_output_factor if self.rescale_output_factor != 1 else y

    return run


def check_feed_forward(self: Any) -> None:
    """Raises: CannotSwapError for a diffusers FeedForward that is not gated."""
    gate = self.net[0]
    if class_path(gate) not in GATES:
        raise CannotSwapError(f"feed-forward with {type(gate).__name__}")


def feed_forward_layers(self: Any) -> tuple[Projection, Projection, Any]:
    """First and second projection and the gate's activation of a diffusers FeedForward.

    Raises: CannotSwapError when it is not gated, or one of its layers is not plain.
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
    """One gated feed-forward, kept and repeated as chosen."""
    first, second, activation = layers
    return feed_forward(
        x, norm, first, second, activation, keep_projection=choices.memory == "balanced",
        grad_dtype=choices.grad_dtype, skip_product=skip_product,
    )  # fmt: skip


def feed_forward_block(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A FeedForward that stands alone."""
    if args or kwargs.get("scale") is not None:
        raise CannotSwapError("arguments that diffusers deprecates")
    layers = feed_forward_layers(self)
    norm = Norm(on=False)
    check_same_dtype(hidden_states, *_tensors(layers[:2], norm))
    return lambda: gated(hidden_states, norm, layers, choices_of(self), skip_product=False)


def check_transformer_block(self: Any) -> None:
    """Raises: CannotSwapError unless this diffusers BasicTransformerBlock is of Stable Diffusion's kind."""
    if self.norm_type != "layer_norm" or self.pos_embed is not None or self.only_cross_attention:
        raise CannotSwapError(f"norm_type {self.norm_type}, positional embeddings or cross-attention alone")
    if self._chunk_size is not None:
        raise CannotSwapError("a feed-forward in chunks")


def check_transformer_block_now(self: Any) -> None:
    """Raises: CannotSwapError for a norm that the fused ops do not know, and where no part of it is served now."""
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
    """BasicTransformerBlock: self-attention, cross-attention and feed-forward with their norms."""
    check_transformer_block(self)
    if cross_attention_kwargs or hidden_states.dim() != 3:
        raise CannotSwapError("processor arguments")
    choices = choices_of(self)

    def run(x: Tensor, context: Tensor | None) -> Tensor:
        if choices.repeats:
            recompute.nobody_reads(self)
        x = x + _attention_part(self.attn1, self.norm1, x, None, attention_mask, choices.of("attn1"))
        if self.attn2 is not None:
            mask = encoder_attention_mask
            x = x + _attention_part(self.attn2, self.norm2, x, context, mask, choices.of("attn2"))
        skip = recompute.is_unread(self)
        return x + _feed_forward_part(self.ff, self.norm3, x, choices.of("ff"), skip_product=skip)

    if choices.repeats:
        return lambda: recompute.run_again_in_backward(self, run, hidden_states, encoder_hidden_states)
    return lambda: run(hidden_states, encoder_hidden_states)


def _attention_part(
    self: Any, norm: nn.Module, x: Tensor, context: Tensor | None, mask: Tensor | None, choices: Choices
) -> Tensor:
    try:
        if mask is not None:
            raise CannotSwapError("an attention mask")
        refuse_hooks(self)
        layers, layer_norm = attention_layers(self), read_layer_norm(norm)
        if self.group_norm is not None or self.residual_connection or self.rescale_output_factor != 1:
            raise CannotSwapError("attention of another form")
        check_same_dtype(x, context, *_tensors(layers, layer_norm))
    except CannotSwapError:
        own: Tensor = self(norm(x), encoder_hidden_states=context, attention_mask=mask)
        return own
    return attend(x, context, layer_norm, layers, self.heads, choices)


def _feed_forward_part(self: Any, norm: nn.Module, x: Tensor, choices: Choices, skip_product: bool) -> Tensor:
    try:
        refuse_hooks(self)
        layers, layer_norm = feed_forward_layers(self), read_layer_norm(norm)
        check_same_dtype(x, *_tensors(layers[:2], layer_norm))
    except CannotSwapError:
        own: Tensor = self(norm(x))
        return own
    return gated(x, layer_norm, layers, choices, skip_product)


# Transformer2DModel: the norm and projections around its blocks


def check_transformer(self: Any) -> None:
    """Raises: CannotSwapError unless this diffusers Transformer2DModel takes pixels, as Stable Diffusion's do."""
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
    """Transformer2DModel: GroupNorm and first projection keep one tensor, and pixels become tokens without a copy."""
    check_transformer(self)
    if return_dict or cross_attention_kwargs or attention_mask is not None or encoder_attention_mask is not None:
        raise CannotSwapError("a named output, processor arguments or masks")
    if self.gradient_checkpointing:
        raise CannotSwapError("gradient checkpointing")
    check_same_dtype(hidden_states, self.norm.weight)
    choices = choices_of(self)
    around = choices.of("norm")

    def run(x: Tensor, context: Tensor | None) -> Tensor:
        height, width = x.shape[2:]
        if choices.repeats and _nobody_reads_blocks(self):
            recompute.nobody_reads(*self.transformer_blocks, self.proj_out)
        if self.use_linear_projection:
            tokens = self.proj_in(normalized(x, self.norm, around).permute(0, 2, 3, 1).flatten(1, 2))
        else:
            tokens = norm_act_conv(x, self.norm, self.proj_in, around, silu=False).permute(0, 2, 3, 1).flatten(1, 2)
        for block in self.transformer_blocks:
            tokens = block(tokens, encoder_hidden_states=context, timestep=timestep, class_labels=class_labels)
        if self.use_linear_projection:
            tokens = self.proj_out(tokens)
        pixels: Tensor = tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2)
        return x + (pixels if self.use_linear_projection else self.proj_out(pixels))

    if choices.repeats:
        return lambda: (recompute.run_again_in_backward(self, run, hidden_states, encoder_hidden_states),)
    return lambda: (run(hidden_states, encoder_hidden_states),)


def _nobody_reads_blocks(self: Any) -> bool:
    """Whether nothing keeps what the blocks and the last projection give: that one is plain and frozen, now."""
    try:
        for layer in (*self.transformer_blocks, self.proj_out):
            refuse_hooks(layer)
    except CannotSwapError:
        return False
    plain = type(self.proj_out) in (nn.Linear, nn.Conv2d)
    return plain and not any(p.requires_grad for p in self.proj_out.parameters())
