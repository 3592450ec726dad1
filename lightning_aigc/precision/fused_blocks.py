"""Forward passes of diffusers' and torch's blocks through the fused ops, with the modules' own parameters.

Each takes the module as `self`, asks first whether the fused ops can serve this call, and else runs the class's own
forward. Whether they can is asked at every call, because adapters are switched, dropout follows train and eval, and
masks come with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_aigc.precision import recompute
from lightning_aigc.precision.layers import (
    CannotSwapError,
    check_conv2d,
    check_group_norm,
    check_silu,
    class_path,
    read_layer_norm,
    read_projection,
    refuse_dropout,
    refuse_hooks,
)
from lightning_aigc_kernels.feed_forward import feed_forward
from lightning_aigc_kernels.frozen_conv2d import frozen_conv2d
from lightning_aigc_kernels.group_norm_silu import group_norm_silu
from lightning_aigc_kernels.group_norm_silu_conv2d import group_norm_silu_conv2d
from lightning_aigc_kernels.linear_with_lora import Projection
from lightning_aigc_kernels.lora_attention import lora_attention
from lightning_aigc_kernels.normalization import Norm

Memory = Literal["off", "balanced", "lean", "max"]
ATTENTION = "diffusers.models.attention_processor.Attention"
PROCESSORS = tuple(f"diffusers.models.attention_processor.{name}" for name in ("AttnProcessor2_0", "AttnProcessorNPU"))
GATES = {"diffusers.models.activations.GEGLU": "gelu", "diffusers.models.activations.SwiGLU": "silu"}

LARGE_PRODUCT = 2e9
"""Operations of one sample's query from which on `lean` keeps a self-attention's key and value, and repeats the
attention to a text, a small one then, in their place. SDXL's take 3.4e9 at 1024 pixels, Stable Diffusion 1.5's 0.8e9
at 512."""


@dataclass(frozen=True)
class Choices:
    """How one module's fused forward runs."""

    memory: Memory
    """What is computed again; see FusedBackwardPrecision."""
    grad_dtype: torch.dtype | None = None
    """The dtype of backward's products; None is the forward's."""
    input_grad_density: float = 1.0
    """Share of a normalisation's input gradient that is passed on."""
    attention_grad_density: float = 1.0
    """Share of dq, dk and dv that is passed on."""
    repeats: bool = False
    """Whether this module is a block that is run again in backward."""

    def lossless(self) -> Choices:
        """The same without what changes a gradient: for a protected module."""
        return replace(self, grad_dtype=None, input_grad_density=1.0, attention_grad_density=1.0)


def choices_of(module: nn.Module) -> Choices:
    """What `swap_forwards` chose for a module; off for one that it left alone."""
    found: Choices = module.__dict__.get("_fused_backward", Choices("off"))
    return found


def fused_or_own(fused: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is `fused` where that serves the call, the class's own where it raises CannotSwapError first.

    Without gradients the class's own runs: pictures sampled in training are those that any other program samples.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            try:
                call = fused(self, *args, **kwargs)
            except CannotSwapError:
                pass
            else:
                return call()
        return type(self).forward(self, *args, **kwargs)

    return forward


def _same_dtype(x: Tensor, *tensors: Tensor | None) -> None:
    """Raises: CannotSwapError for dtypes that differ outside autocast, where torch has rules of its own."""
    if torch.is_autocast_enabled(x.device.type):
        return
    other = next((t.dtype for t in tensors if t is not None and t.dtype != x.dtype), None)
    if other is not None:
        raise CannotSwapError(f"input {x.dtype} beside {other} without autocast")


# ResNet blocks and convolutions


def check_resnet(self: Any) -> None:
    """Raises: CannotSwapError unless this diffusers ResnetBlock2D has the shape that Stable Diffusion's have."""
    for norm in (self.norm1, self.norm2):
        check_group_norm(norm)
    check_silu(self.nonlinearity)
    if self.upsample is not None or self.downsample is not None:
        raise CannotSwapError("it changes the resolution inside")
    refuse_dropout(self.dropout)


def resnet(self: Any, input_tensor: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """ResnetBlock2D: each GroupNorm, SiLU and convolution keep one tensor."""
    check_resnet(self)
    if args or kwargs.get("scale") is not None or (temb is None and self.time_embedding_norm == "scale_shift"):
        raise CannotSwapError("arguments that diffusers refuses or deprecates")
    _same_dtype(input_tensor, self.norm1.weight, self.conv1.weight if type(self.conv1) is nn.Conv2d else None)
    choices = choices_of(self)

    def run(x: Tensor, temb: Tensor | None) -> Tensor:
        hidden = norm_act_conv(x, self.norm1, self.conv1, choices)
        scale = shift = None
        if self.time_emb_proj is not None and temb is not None:
            temb = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))
            if self.time_embedding_norm == "default":
                hidden = hidden + temb[:, :, None, None]
            elif self.time_embedding_norm == "scale_shift":
                scale, shift = temb.chunk(2, dim=1)
        hidden = norm_act_conv(hidden, self.norm2, self.conv2, choices, scale, shift, last=True)
        x = x if self.conv_shortcut is None else self.conv_shortcut(x.contiguous() if self.training else x)
        return (x + hidden) / self.output_scale_factor if self.output_scale_factor != 1 else x + hidden

    if choices.repeats:
        return lambda: recompute.run_again_in_backward(run, input_tensor, temb)
    return lambda: run(input_tensor, temb)


def norm_act_conv(
    x: Tensor,
    norm: nn.GroupNorm,
    conv: Any,
    choices: Choices,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    silu: bool = True,
    last: bool = False,
) -> Tensor:
    """conv(silu(norm(x))) or conv(norm(x)) as one op; as two when the convolution is no plain one, with LoRA say."""
    try:
        check_conv2d(conv)
    except CannotSwapError:
        y = group_norm_silu(
            x, norm.weight, norm.bias, norm.num_groups, norm.eps, scale=scale, shift=shift, silu=silu,
            input_grad_density=choices.input_grad_density,
        )  # fmt: skip
        activated: Tensor = conv(y)
        return activated
    return group_norm_silu_conv2d(
        x, norm.weight, norm.bias, norm.num_groups, norm.eps, conv.weight, conv.bias, conv.stride, conv.padding,
        conv.dilation, conv.groups, scale=scale, shift=shift, silu=silu, input_grad_density=choices.input_grad_density,
        grad_dtype=choices.grad_dtype, skip_product=last and choices.repeats and recompute.repeating(),
    )  # fmt: skip


def check_frozen_conv(self: Any) -> None:
    """Raises: CannotSwapError for a convolution that is trained."""
    check_conv2d(self)
    if self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad):
        raise CannotSwapError("its weight is trained")


def convolution(self: Any, input: Tensor) -> Any:  # noqa: A002  # torch's own name
    """A frozen Conv2d that keeps nothing."""
    check_frozen_conv(self)
    _same_dtype(input, self.weight)
    if input.dim() != 4:
        raise CannotSwapError("an input without a batch dimension")
    skip = recompute.is_unread(self)
    return lambda: frozen_conv2d(
        input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, skip_product=skip
    )


def triples_of(self: Any) -> list[int]:
    """Where GroupNorm, SiLU and Conv2d follow one another in a Sequential.

    Raises: CannotSwapError where they do not.
    """
    found = []
    for i in range(len(self) - 2):
        try:
            check_group_norm(self[i])
            check_silu(self[i + 1])
            check_conv2d(self[i + 2])
        except CannotSwapError:
            continue
        found.append(i)
    if not found:
        raise CannotSwapError("no GroupNorm, SiLU and Conv2d in a row")
    return found


def sequential(self: Any, input: Tensor) -> Any:  # noqa: A002  # torch's own name
    """A Sequential whose GroupNorm, SiLU, Conv2d triples run as one op each."""
    triples = triples_of(self)
    for i in triples:
        _same_dtype(input, self[i].weight, self[i + 2].weight)
    choices = choices_of(self)

    def run() -> Tensor:
        x, i = input, 0
        while i < len(self):
            if i in triples:
                x, i = norm_act_conv(x, self[i], self[i + 2], choices), i + 3
            else:
                x, i = self[i](x), i + 1
        return x

    return run


# Attention and feed-forward


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
    _same_dtype(hidden_states, encoder_hidden_states, *_tensors(layers, norm))
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
            x = _normalized(x, self.group_norm, choices)
        if x.dim() == 4 or self.group_norm is not None:
            x = x.flatten(2).transpose(1, 2)
        y = attend(x, encoder_hidden_states, norm, layers, self.heads, choices)
        if hidden_states.dim() == 4:
            y = y.transpose(-1, -2).reshape(hidden_states.shape)
        y = y + hidden_states if self.residual_connection else y
        return y / self.rescale_output_factor if self.rescale_output_factor != 1 else y

    return run


def feed_forward_layers(self: Any) -> tuple[Projection, Projection, Any]:
    """First and second projection and the gate's activation of a diffusers FeedForward.

    Raises: CannotSwapError when it is not gated, or one of its layers is not plain.
    """
    gate, dropout, second, *rest = self.net
    activation = GATES.get(class_path(gate))
    if activation is None:
        raise CannotSwapError(f"feed-forward with {type(gate).__name__}")
    refuse_hooks(gate)
    for layer in (dropout, *rest):
        refuse_dropout(layer)
    return read_projection(gate.proj), read_projection(second), activation


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
    _same_dtype(hidden_states, *_tensors(layers[:2], norm))
    return lambda: gated(hidden_states, norm, layers, choices_of(self), skip_product=False)


def check_transformer_block(self: Any) -> None:
    """Raises: CannotSwapError unless this diffusers BasicTransformerBlock is of Stable Diffusion's kind."""
    if self.norm_type != "layer_norm" or self.pos_embed is not None or self.only_cross_attention:
        raise CannotSwapError(f"norm_type {self.norm_type}, positional embeddings or cross-attention alone")
    if self._chunk_size is not None:
        raise CannotSwapError("a feed-forward in chunks")


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
        x = x + _attention_part(self.attn1, self.norm1, x, None, attention_mask, choices)
        if self.attn2 is not None:
            x = x + _attention_part(self.attn2, self.norm2, x, context, encoder_attention_mask, choices)
        return x + _feed_forward_part(self.ff, self.norm3, x, choices, skip_product=recompute.is_unread(self))

    if choices.repeats:
        return lambda: recompute.run_again_in_backward(run, hidden_states, encoder_hidden_states)
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
        _same_dtype(x, context, *_tensors(layers, layer_norm))
    except CannotSwapError:
        own: Tensor = self(norm(x), encoder_hidden_states=context, attention_mask=mask)
        return own
    return attend(x, context, layer_norm, layers, self.heads, choices)


def _feed_forward_part(self: Any, norm: nn.Module, x: Tensor, choices: Choices, skip_product: bool) -> Tensor:
    try:
        refuse_hooks(self)
        layers, layer_norm = feed_forward_layers(self), read_layer_norm(norm)
        _same_dtype(x, *_tensors(layers[:2], layer_norm))
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
    _same_dtype(hidden_states, self.norm.weight)
    choices = choices_of(self)

    def run(x: Tensor, context: Tensor | None) -> Tensor:
        height, width = x.shape[2:]
        if choices.repeats and _keeps_no_input(self.proj_out):
            recompute.nobody_reads(*self.transformer_blocks, self.proj_out)
        if self.use_linear_projection:
            tokens = self.proj_in(_normalized(x, self.norm, choices).permute(0, 2, 3, 1).flatten(1, 2))
        else:
            tokens = norm_act_conv(x, self.norm, self.proj_in, choices, silu=False).permute(0, 2, 3, 1).flatten(1, 2)
        for block in self.transformer_blocks:
            tokens = block(tokens, encoder_hidden_states=context, timestep=timestep, class_labels=class_labels)
        if self.use_linear_projection:
            tokens = self.proj_out(tokens)
        pixels: Tensor = tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2)
        return x + (pixels if self.use_linear_projection else self.proj_out(pixels))

    if choices.repeats:
        return lambda: (recompute.run_again_in_backward(run, hidden_states, encoder_hidden_states),)
    return lambda: (run(hidden_states, encoder_hidden_states),)


def _keeps_no_input(layer: nn.Module) -> bool:
    """Whether autograd keeps nothing of this layer's input: it is plain and frozen, now."""
    return type(layer) in (nn.Linear, nn.Conv2d) and not any(p.requires_grad for p in layer.parameters())


def _normalized(x: Tensor, norm: nn.GroupNorm, choices: Choices) -> Tensor:
    return group_norm_silu(
        x, norm.weight, norm.bias, norm.num_groups, norm.eps, silu=False, input_grad_density=choices.input_grad_density
    )
