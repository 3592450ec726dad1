"""Forwards of the blocks of diffusers' transformers on fused ops: norms with modulation, attention, gated residuals.

Each takes the block as `self` and the class's arguments. It computes what the class's forward does, with other
rounding, and raises CannotSwapError for a call that it does not serve. `whole_blocks` runs it again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_aigc.precision.layers import CannotSwapError, class_path, refuse_hooks
from lightning_aigc.precision.stream_attention import (
    SWIGLU,
    Rotary,
    attend,
    attend_in_parallel,
    check_attention,
    gated,
    key_bias_of,
    read_norm,
    rotary_of,
    rotary_of_complex,
)
from lightning_aigc_kernels import gated_residual, modulated_norm, silu_mul
from lightning_aigc_kernels.dispatch import KERNEL_DEVICES

MODELS = "diffusers.models.transformers.transformer_"
LARGEST_HALF = 65504
"""To which diffusers' blocks clip what they return in float16."""


class Half(NamedTuple):
    """One stream of a block with two: its tokens [N, T, C], their norms, feed-forward and modulation."""

    x: Tensor
    norm1: Any
    norm2: Any
    feed_forward: Callable[[Tensor], Tensor]
    modulation: tuple[Tensor, ...]
    """Shift, scale and gate of the attention, then of the feed-forward."""

    def normed(self) -> Tensor:
        return modulated(self.norm1, self.x, self.modulation[1], self.modulation[0])

    def after(self, attended: Tensor) -> Tensor:
        """The stream behind the attention's output."""
        _, _, gate1, shift2, scale2, gate2 = self.modulation
        x = gated_residual(self.x, gate1, attended)
        return gated_residual(x, gate2, self.feed_forward(modulated(self.norm2, x, scale2, shift2)))


def forward_for(block: nn.Module, device: torch.device) -> Callable[..., Any] | None:
    """The fused forward for a block on this device, None where the class's own is as good: without kernels."""
    return FORWARDS.get(class_path(block)) if device.type in KERNEL_DEVICES else None


def modulated(norm: Any, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """norm(x) * (1 + scale) + shift."""
    how = read_norm(norm)
    return modulated_norm(x, scale, shift, norm=how.kind, weight=how.weight, bias=how.bias, eps=how.eps)  # type: ignore[arg-type]


def double_stream(
    attention: Any,
    picture: Half,
    text: Half,
    rotary: tuple[Rotary | None, Rotary | None] = (None, None),
    text_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both streams behind a block of FLUX.1, FLUX.2 or Qwen-Image, text first; rotary: the picture's and the text's."""
    attended, text_attended = attend(attention, picture.normed(), text.normed(), *rotary, text_bias=text_bias)
    assert text_attended is not None
    return in_half_range(text.after(text_attended)), picture.after(attended)


def in_half_range(x: Tensor) -> Tensor:
    return x.clip(-LARGEST_HALF, LARGEST_HALF) if x.dtype == torch.float16 else x


def modulation_of(module: Any, condition: Tensor, parts: int) -> tuple[Tensor, ...]:
    """The shifts, scales and gates [N, C] of an adaptive norm of diffusers. Raises: CannotSwapError for hooks on it."""
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
    """JointTransformerBlock: Stable Diffusion 3 and 3.5, with a second attention of the picture in some blocks."""
    second = (self.attn2,) if self.use_dual_attention else ()
    check(self.attn, *second, refused=(joint_attention_kwargs, self._chunk_size))
    x = hidden_states
    modulation = modulation_of(self.norm1, temb, 9 if second else 6)
    picture = Half(x, self.norm1.norm, self.norm2, self.ff, modulation[:6])
    if self.context_pre_only:
        refuse_hooks(self.norm1_context)
        condition = self.norm1_context.silu(temb).to(encoder_hidden_states.dtype)
        text_scale, text_shift = self.norm1_context.linear(condition).chunk(2, dim=1)
        text_normed = modulated(self.norm1_context.norm, encoder_hidden_states, text_scale, text_shift)
        attended, _ = attend(self.attn, picture.normed(), text_normed, picture_first=True)
        text = None
    else:
        text_modulation = modulation_of(self.norm1_context, temb, 6)
        half = Half(
            encoder_hidden_states, self.norm1_context.norm, self.norm2_context, self.ff_context, text_modulation
        )
        attended, text_attended = attend(self.attn, picture.normed(), half.normed(), picture_first=True)
        assert text_attended is not None
        text = half.after(text_attended)
    if second:
        shift, scale, gate = modulation[6:]
        attended2, _ = attend(self.attn2, modulated(self.norm1.norm, x, scale, shift))
        picture = picture._replace(x=gated_residual(x, gate, attended2))
    return text, picture.after(attended)


def flux_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """FluxTransformerBlock: FLUX.1's blocks of two streams."""
    check(self.attn, refused=(joint_attention_kwargs,))
    text_rotary, rotary = rotary_of(image_rotary_emb, encoder_hidden_states.shape[1], hidden_states.shape[1])
    picture = Half(hidden_states, self.norm1.norm, self.norm2, self.ff, modulation_of(self.norm1, temb, 6))
    text = Half(
        encoder_hidden_states, self.norm1_context.norm, self.norm2_context, self.ff_context,
        modulation_of(self.norm1_context, temb, 6),
    )  # fmt: skip
    return double_stream(self.attn, picture, text, (rotary, text_rotary))


def flux_single_block(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """FluxSingleTransformerBlock: FLUX.1's blocks of one stream, with the feed-forward beside the attention."""
    check(self.attn, refused=(joint_attention_kwargs,))
    x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    (rotary,) = rotary_of(image_rotary_emb, x.shape[1])
    shift, scale, gate = modulation_of(self.norm, temb, 3)
    normed = modulated(self.norm.norm, x, scale, shift)
    beside = self.act_mlp(self.proj_mlp(normed))
    attended, _ = attend(self.attn, normed, None, rotary)
    x = in_half_range(gated_residual(x, gate, self.proj_out(torch.cat([attended, beside], dim=2))))
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
    """Flux2TransformerBlock: FLUX.2's blocks of two streams, whose modulations come from outside."""
    check(self.attn, refused=(joint_attention_kwargs,))
    for layer in (self.ff, self.ff_context):
        _check_swiglu(layer.act_fn)
        refuse_hooks(layer)
    text_rotary, rotary = rotary_of(image_rotary_emb, encoder_hidden_states.shape[1], hidden_states.shape[1])
    picture = Half(
        hidden_states, self.norm1, self.norm2, lambda x: gated(self.ff, x), _rows(temb_mod_img).chunk(6, dim=-1)
    )
    text = Half(
        encoder_hidden_states, self.norm1_context, self.norm2_context, lambda x: gated(self.ff_context, x),
        _rows(temb_mod_txt).chunk(6, dim=-1),
    )  # fmt: skip
    return double_stream(self.attn, picture, text, (rotary, text_rotary))


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
    """Flux2SingleTransformerBlock: FLUX.2's parallel blocks, one projection to attention and feed-forward."""
    check(self.attn, refused=(joint_attention_kwargs,))
    _check_swiglu(self.attn.mlp_act_fn)
    x = hidden_states
    if encoder_hidden_states is not None:
        text_seq_len = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, x], dim=1)
    (rotary,) = rotary_of(image_rotary_emb, x.shape[1])
    shift, scale, gate = _rows(temb_mod).chunk(3, dim=-1)
    attended = attend_in_parallel(self.attn, modulated(self.norm, x, scale, shift), rotary)
    x = in_half_range(gated_residual(x, gate, attended))
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
    """QwenImageTransformerBlock. Nobody attends to a text's padding."""
    check(self.attn, refused=(joint_attention_kwargs, modulate_index))
    if self.zero_cond_t:
        raise CannotSwapError("a second condition")
    text_bias = key_bias_of(encoder_hidden_states_mask)
    rotary, text_rotary = (rotary_of_complex(part, temb.device) for part in image_rotary_emb or (None, None))
    picture = Half(hidden_states, self.img_norm1, self.img_norm2, self.img_mlp, self.img_mod(temb).chunk(6, dim=-1))
    text = Half(
        encoder_hidden_states, self.txt_norm1, self.txt_norm2, self.txt_mlp, self.txt_mod(temb).chunk(6, dim=-1)
    )
    text_out, picture_out = double_stream(self.attn, picture, text, (rotary, text_rotary), text_bias)
    return text_out, in_half_range(picture_out)


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
    """ZImageTransformerBlock: norms before and behind both parts, and no shift. Nobody attends to padding."""
    check(self.attention, refused=(noise_mask, adaln_noisy, adaln_clean))
    bias = key_bias_of(attn_mask)
    refuse_hooks(self.feed_forward)
    scale1 = gate1 = scale2 = gate2 = None
    if self.modulation:
        scale1, gate1, scale2, gate2 = self.adaLN_modulation(adaln_input).chunk(4, dim=1)
        gate1, gate2 = gate1.tanh(), gate2.tanh()
    rotary = rotary_of_complex(freqs_cis, x.device)
    normed = modulated(self.attention_norm1, x, scale1)
    attended, _ = attend(self.attention, normed, None, rotary, picture_bias=bias)
    x = _normed_residual(x, gate1, attended, self.attention_norm2)
    layer, normed = self.feed_forward, modulated(self.ffn_norm1, x, scale2)
    return _normed_residual(x, gate2, layer.w2(silu_mul(layer.w1(normed), layer.w3(normed))), self.ffn_norm2)


def _normed_residual(x: Tensor, gate: Tensor | None, y: Tensor, norm: Any) -> Tensor:
    how = read_norm(norm)
    if how.kind != "rms":
        raise CannotSwapError(f"a residual behind {class_path(norm)}")
    return gated_residual(x, gate, y, norm_weight=how.weight, eps=how.eps, rms=True)


def _check_swiglu(module: nn.Module) -> None:
    refuse_hooks(module)
    if class_path(module) != SWIGLU:
        raise CannotSwapError(f"activation {class_path(module)}")


def _rows(modulation: Tensor) -> Tensor:
    """FLUX.2's modulation [1, 1, 6 C] or [N, 6 C] as one row a sample."""
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
