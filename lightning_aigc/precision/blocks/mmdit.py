"""Forwards of diffusers' MMDiT blocks on fused ops: norms with modulation, attention, gated residuals.

Each forward takes the block as `self` and the class's arguments. It computes the same function as the class's forward,
with other rounding, and raises CannotSwapError for a call that it does not serve. `checkpointed_blocks` recomputes it
in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_aigc.precision.blocks.layers import CannotSwapError, class_path, refuse_hooks
from lightning_aigc.precision.blocks.stream_attention import (
    SWIGLU,
    Rotary,
    attend,
    attend_in_parallel,
    check_attention,
    gated_feed_forward,
    key_bias_of,
    read_norm,
    rotary_of,
    rotary_of_complex,
)
from lightning_aigc_kernels import gated_residual, modulated_norm, silu_mul
from lightning_aigc_kernels.dispatch import KERNEL_DEVICES

MODELS = "diffusers.models.transformers.transformer_"
LARGEST_FLOAT16 = 65504
"""Magnitude to which diffusers' blocks clip their float16 output."""


class Stream(NamedTuple):
    """One of a block's two streams: its tokens [N, T, C], norms, feed-forward and modulation."""

    x: Tensor
    norm1: Any
    norm2: Any
    feed_forward: Callable[[Tensor], Tensor]
    modulation: tuple[Tensor, ...]
    """Shift, scale and gate of the attention, then of the feed-forward."""

    def pre_attention(self) -> Tensor:
        """Return the tokens that enter the attention."""
        return modulated(self.norm1, self.x, self.modulation[1], self.modulation[0])

    def finish(self, attended: Tensor) -> Tensor:
        """Return the block's output for this stream, given the attention's output."""
        _, _, gate1, shift2, scale2, gate2 = self.modulation
        x = gated_residual(self.x, gate1, attended)
        return gated_residual(x, gate2, self.feed_forward(modulated(self.norm2, x, scale2, shift2)))


def forward_for(block: nn.Module, device: torch.device) -> Callable[..., Any] | None:
    """Return the fused forward for a block on this device; None for a device without kernels."""
    return FORWARDS.get(class_path(block)) if device.type in KERNEL_DEVICES else None


def modulated(norm: Any, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """Compute norm(x) * (1 + scale) + shift."""
    spec = read_norm(norm)
    return modulated_norm(x, scale, shift, norm=spec.kind, weight=spec.weight, bias=spec.bias, eps=spec.eps)  # type: ignore[arg-type]


def double_stream(
    attention: Any,
    image: Stream,
    text: Stream,
    rotary: tuple[Rotary | None, Rotary | None] = (None, None),
    text_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a block of two streams of FLUX.1, FLUX.2 or Qwen-Image.

    Args: rotary: Rotary positions of image and text.
    Returns: text and image, in this order.
    """
    attended, text_attended = attend(
        attention, image.pre_attention(), text.pre_attention(), *rotary, text_bias=text_bias
    )
    assert text_attended is not None
    return in_float16_range(text.finish(text_attended)), image.finish(attended)


def in_float16_range(x: Tensor) -> Tensor:
    """Clip a float16 tensor as diffusers' blocks do."""
    return x.clip(-LARGEST_FLOAT16, LARGEST_FLOAT16) if x.dtype == torch.float16 else x


def modulation_of(module: Any, condition: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Compute the shifts, scales and gates [N, C] of a diffusers adaptive norm. Raises: CannotSwapError for hooks."""
    refuse_hooks(module)
    return tuple(module.linear(module.silu(condition)).chunk(parts, dim=1))


def check(*attentions: Any, refused: tuple[Any, ...] = ()) -> None:
    """Raise CannotSwapError for an attention or an argument that no fused forward serves."""
    if any(argument is not None and not (isinstance(argument, dict) and not argument) for argument in refused):
        raise CannotSwapError("an argument that the fused forward does not take")
    for attention in attentions:
        check_attention(attention)


def joint_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor | None, Tensor]:
    """JointTransformerBlock: Stable Diffusion 3 and 3.5, some blocks with a second attention of the image stream."""
    second = (self.attn2,) if self.use_dual_attention else ()
    check(self.attn, *second, refused=(joint_attention_kwargs, self._chunk_size))
    x = hidden_states
    modulation = modulation_of(self.norm1, temb, 9 if second else 6)
    image = Stream(x, self.norm1.norm, self.norm2, self.ff, modulation[:6])
    if self.context_pre_only:
        refuse_hooks(self.norm1_context)
        condition = self.norm1_context.silu(temb).to(encoder_hidden_states.dtype)
        text_scale, text_shift = self.norm1_context.linear(condition).chunk(2, dim=1)
        text_normed = modulated(self.norm1_context.norm, encoder_hidden_states, text_scale, text_shift)
        attended, _ = attend(self.attn, image.pre_attention(), text_normed, image_first=True)
        text = None
    else:
        text_modulation = modulation_of(self.norm1_context, temb, 6)
        text_stream = Stream(
            encoder_hidden_states, self.norm1_context.norm, self.norm2_context, self.ff_context, text_modulation
        )
        attended, text_attended = attend(
            self.attn, image.pre_attention(), text_stream.pre_attention(), image_first=True
        )
        assert text_attended is not None
        text = text_stream.finish(text_attended)
    if second:
        shift, scale, gate = modulation[6:]
        attended2, _ = attend(self.attn2, modulated(self.norm1.norm, x, scale, shift))
        image = image._replace(x=gated_residual(x, gate, attended2))
    return text, image.finish(attended)


def flux_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """FluxTransformerBlock: a FLUX.1 block of two streams."""
    check(self.attn, refused=(joint_attention_kwargs,))
    text_rotary, rotary = rotary_of(image_rotary_emb, encoder_hidden_states.shape[1], hidden_states.shape[1])
    image = Stream(hidden_states, self.norm1.norm, self.norm2, self.ff, modulation_of(self.norm1, temb, 6))
    text = Stream(
        encoder_hidden_states, self.norm1_context.norm, self.norm2_context, self.ff_context,
        modulation_of(self.norm1_context, temb, 6),
    )  # fmt: skip
    return double_stream(self.attn, image, text, (rotary, text_rotary))


def flux_single_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """FluxSingleTransformerBlock: a FLUX.1 block of one stream, with attention and feed-forward in parallel."""
    check(self.attn, refused=(joint_attention_kwargs,))
    x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    (rotary,) = rotary_of(image_rotary_emb, x.shape[1])
    shift, scale, gate = modulation_of(self.norm, temb, 3)
    normed = modulated(self.norm.norm, x, scale, shift)
    feed_forward = self.act_mlp(self.proj_mlp(normed))
    attended, _ = attend(self.attn, normed, None, rotary)
    x = in_float16_range(gated_residual(x, gate, self.proj_out(torch.cat([attended, feed_forward], dim=2))))
    text_tokens = encoder_hidden_states.shape[1]
    return x[:, :text_tokens], x[:, text_tokens:]


def flux2_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod_img: Tensor,
    temb_mod_txt: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Flux2TransformerBlock: a FLUX.2 block of two streams, with modulations as arguments."""
    check(self.attn, refused=(joint_attention_kwargs,))
    for layer in (self.ff, self.ff_context):
        _check_swiglu(layer.act_fn)
        refuse_hooks(layer)
    text_rotary, rotary = rotary_of(image_rotary_emb, encoder_hidden_states.shape[1], hidden_states.shape[1])
    image = Stream(
        hidden_states,
        self.norm1,
        self.norm2,
        lambda x: gated_feed_forward(self.ff, x),
        _rows(temb_mod_img).chunk(6, dim=-1),
    )
    text = Stream(
        encoder_hidden_states, self.norm1_context, self.norm2_context, lambda x: gated_feed_forward(self.ff_context, x),
        _rows(temb_mod_txt).chunk(6, dim=-1),
    )  # fmt: skip
    return double_stream(self.attn, image, text, (rotary, text_rotary))


def flux2_single_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    temb_mod: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> Any:
    """Flux2SingleTransformerBlock: a FLUX.2 parallel block, with one projection to attention and feed-forward."""
    check(self.attn, refused=(joint_attention_kwargs,))
    _check_swiglu(self.attn.mlp_act_fn)
    x = hidden_states
    if encoder_hidden_states is not None:
        text_seq_len = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, x], dim=1)
    (rotary,) = rotary_of(image_rotary_emb, x.shape[1])
    shift, scale, gate = _rows(temb_mod).chunk(3, dim=-1)
    attended = attend_in_parallel(self.attn, modulated(self.norm, x, scale, shift), rotary)
    x = in_float16_range(gated_residual(x, gate, attended))
    return (x[:, :text_seq_len], x[:, text_seq_len:]) if split_hidden_states else x


def qwen_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Any = None,
) -> tuple[Tensor, Tensor]:
    """QwenImageTransformerBlock; padding tokens of a text are masked."""
    check(self.attn, refused=(joint_attention_kwargs, modulate_index))
    if self.zero_cond_t:
        raise CannotSwapError("a second condition")
    text_bias = key_bias_of(encoder_hidden_states_mask)
    rotary, text_rotary = (rotary_of_complex(part, temb.device) for part in image_rotary_emb or (None, None))
    image = Stream(hidden_states, self.img_norm1, self.img_norm2, self.img_mlp, self.img_mod(temb).chunk(6, dim=-1))
    text = Stream(
        encoder_hidden_states, self.txt_norm1, self.txt_norm2, self.txt_mlp, self.txt_mod(temb).chunk(6, dim=-1)
    )
    text_out, image_out = double_stream(self.attn, image, text, (rotary, text_rotary), text_bias)
    return text_out, in_float16_range(image_out)


def z_image_block(
    self: Any,
    x: Tensor,
    attn_mask: Tensor | None,
    freqs_cis: Tensor | None,
    adaln_input: Tensor | None = None,
    noise_mask: Tensor | None = None,
    adaln_noisy: Tensor | None = None,
    adaln_clean: Tensor | None = None,
) -> Tensor:
    """ZImageTransformerBlock: norms before and after both parts, and no shift; padding tokens are masked."""
    check(self.attention, refused=(noise_mask, adaln_noisy, adaln_clean))
    bias = key_bias_of(attn_mask)
    refuse_hooks(self.feed_forward)
    scale1 = gate1 = scale2 = gate2 = None
    if self.modulation:
        scale1, gate1, scale2, gate2 = self.adaLN_modulation(adaln_input).chunk(4, dim=1)
        gate1, gate2 = gate1.tanh(), gate2.tanh()
    rotary = rotary_of_complex(freqs_cis, x.device)
    normed = modulated(self.attention_norm1, x, scale1)
    attended, _ = attend(self.attention, normed, None, rotary, image_bias=bias)
    x = _normed_residual(x, gate1, attended, self.attention_norm2)
    layer, normed = self.feed_forward, modulated(self.ffn_norm1, x, scale2)
    return _normed_residual(x, gate2, layer.w2(silu_mul(layer.w1(normed), layer.w3(normed))), self.ffn_norm2)


def _normed_residual(x: Tensor, gate: Tensor | None, y: Tensor, norm: Any) -> Tensor:
    spec = read_norm(norm)
    if spec.kind != "rms":
        raise CannotSwapError(f"a residual after {class_path(norm)}")
    return gated_residual(x, gate, y, norm_weight=spec.weight, eps=spec.eps, rms=True)


def _check_swiglu(module: nn.Module) -> None:
    refuse_hooks(module)
    if class_path(module) != SWIGLU:
        raise CannotSwapError(f"activation {class_path(module)}")


def _rows(modulation: Tensor) -> Tensor:
    """Reshape FLUX.2's modulation [1, 1, 6 C] or [N, 6 C] to one row per sample."""
    return modulation.flatten(0, -2)


FORWARDS: dict[str, Callable[..., Any]] = {
    "diffusers.models.attention.JointTransformerBlock": joint_block,
    f"{MODELS}flux.FluxTransformerBlock": flux_block,
    f"{MODELS}flux.FluxSingleTransformerBlock": flux_single_block,
    f"{MODELS}flux2.Flux2TransformerBlock": flux2_block,
    f"{MODELS}flux2.Flux2SingleTransformerBlock": flux2_single_block,
    f"{MODELS}qwenimage.QwenImageTransformerBlock": qwen_block,
    f"{MODELS}z_image.ZImageTransformerBlock": z_image_block,
}
