"""Attentions of diffusers' transformers over the streams of text and image, as one fused op.

The module's own layers project, so that any adapter on them works; `joint_attention` runs between the input and output
projections. Rotary positions are computed in real numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_aigc.precision.blocks.layers import CannotSwapError, class_path, refuse_hooks
from lightning_aigc_kernels import AttentionStream, joint_attention, rotary_from_complex, rotary_from_repeated, silu_mul

PROCESSORS = frozenset({
    "diffusers.models.attention_processor.JointAttnProcessor2_0",
    "diffusers.models.transformers.transformer_flux.FluxAttnProcessor",
    "diffusers.models.transformers.transformer_flux2.Flux2AttnProcessor",
    "diffusers.models.transformers.transformer_flux2.Flux2ParallelSelfAttnProcessor",
    "diffusers.models.transformers.transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0",
    "diffusers.models.transformers.transformer_z_image.ZSingleStreamAttnProcessor",
    "lightning_aigc.precision.blocks.equal_tokens.EqualTokensProcessor",
})  # fmt: skip
SWIGLU = "diffusers.models.transformers.transformer_flux2.Flux2SwiGLU"
RMS_NORMS = ("diffusers.models.normalization.RMSNorm", "torch.nn.modules.normalization.RMSNorm")
EPS = 1e-6
"""Value for an attention without norms, which does not use it."""
Rotary = tuple[Tensor, Tensor]


class NormSpec(NamedTuple):
    """Kind and tensors of a norm over the last dimension."""

    kind: str
    """layer or rms."""
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def read_norm(module: Any) -> NormSpec:
    """Read a LayerNorm or RMSNorm over the last dimension. Raises: CannotSwapError for any other norm."""
    refuse_hooks(module)
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return NormSpec("layer", module.weight, module.bias, module.eps)
    if class_path(module) in RMS_NORMS and module.eps is not None and getattr(module, "bias", None) is None:
        return NormSpec("rms", module.weight, None, module.eps)
    raise CannotSwapError(f"{class_path(module)} is not a norm that a fused op supports")


def check_attention(attention: Any) -> None:
    """Raise CannotSwapError unless this attention has its class's default processor."""
    refuse_hooks(attention)
    processor = attention.processor
    if class_path(processor) not in PROCESSORS:
        raise CannotSwapError(f"the attention processor {type(processor).__name__}")
    if getattr(processor, "_attention_backend", None) or getattr(processor, "_parallel_config", None):
        raise CannotSwapError("a chosen attention backend, or context parallelism")
    if getattr(attention, "fused_projections", False):
        raise CannotSwapError("fused projections")
    _norms(attention)


def attend(
    attention: Any,
    image: Tensor,
    text: Tensor | None = None,
    image_rotary: Rotary | None = None,
    text_rotary: Rotary | None = None,
    image_first: bool = False,
    image_bias: Tensor | None = None,
    text_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention's output for each stream, through the output projections that it has.

    Args: image [N, T, C] and text [N, S, C], each with cos and sin for its tokens and a bias for its keys. If unset,
        the processor's `text_bias` gives the text's bias, if it has one.
    """
    query_norm, key_norm, added_query_norm, added_key_norm = _norms(attention)
    cos, sin = image_rotary or (None, None)
    streams = [
        AttentionStream(
            attention.to_q(image), attention.to_k(image), attention.to_v(image),
            _weight(query_norm), _weight(key_norm), cos, sin, image_bias,
        )
    ]  # fmt: skip
    if text is not None:
        if text_bias is None and (bias := getattr(attention.processor, "text_bias", None)):
            text_bias = bias(text)
        cos, sin = text_rotary or (None, None)
        stream = AttentionStream(
            attention.add_q_proj(text), attention.add_k_proj(text), attention.add_v_proj(text),
            _weight(added_query_norm), _weight(added_key_norm), cos, sin, text_bias,
        )  # fmt: skip
        streams.insert(1 if image_first else 0, stream)
    outputs = _joint(attention, streams, query_norm)
    image_out = outputs[0 if image_first or text is None else 1]
    text_out = None if text is None else outputs[1 if image_first else 0]
    if not getattr(attention, "pre_only", False):
        for layer in attention.to_out:
            image_out = layer(image_out)
    if text_out is not None and not getattr(attention, "context_pre_only", None):
        text_out = attention.to_add_out(text_out)
    return image_out, text_out


def attend_in_parallel(attention: Any, x: Tensor, rotary: Rotary | None) -> Tensor:
    """Run FLUX.2's attention in parallel with its feed-forward: one projection to both, one from both."""
    query_norm, key_norm, _, _ = _norms(attention)
    width = attention.inner_dim
    projected = attention.to_qkv_mlp_proj(x)
    sizes = [width] * 3 + [attention.mlp_hidden_dim] * 2
    query, key, value, gate, up = torch.split(projected, sizes, dim=-1)
    stream = AttentionStream(query, key, value, _weight(query_norm), _weight(key_norm), *(rotary or ()))
    (output,) = _joint(attention, [stream], query_norm)
    projected_back: Tensor = attention.to_out(torch.cat([output, silu_mul(gate, up)], dim=-1))
    return projected_back


def gated_feed_forward(layer: Any, x: Tensor) -> Tensor:
    """Run FLUX.2's feed-forward, whose first projection computes gate and value together."""
    gate, up = layer.linear_in(x).chunk(2, dim=-1)
    y: Tensor = layer.linear_out(silu_mul(gate, up))
    return y


def rotary_of(given: Any, *tokens: int) -> list[Rotary | None]:
    """Return cos and sin for streams of these numbers of tokens, from the rotary argument of FLUX's blocks."""
    if given is None:
        return [None] * len(tokens)
    cos, sin = rotary_from_repeated(*given)
    return list(zip(torch.split(cos, list(tokens)), torch.split(sin, list(tokens)), strict=True))


def rotary_of_complex(given: Tensor | None, device: torch.device) -> Rotary | None:
    """Return cos and sin of the rotations of Z-Image's and Qwen-Image's blocks: complex ones, or pairs on an NPU."""
    if given is None or given.is_complex():
        return None if given is None else rotary_from_complex(given, device)
    cos, sin = (part.contiguous() for part in given.unbind(-1))
    return cos, sin


def key_bias_of(mask: Tensor | None) -> Tensor | None:
    """Convert a mask [N, T], True for tokens to attend to, to keys' biases. Raises: CannotSwapError for other masks."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise CannotSwapError(f"a mask of {mask.dtype} with {mask.dim()} dimensions")
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf)


def _norms(attention: Any) -> list[NormSpec | None]:
    """Read the norms of queries and keys, also the added ones. Raises: CannotSwapError unless existing ones agree."""
    names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    modules = [getattr(attention, name, None) for name in names]
    norms = [None if module is None else read_norm(module) for module in modules]
    existing = [norm for norm in norms if norm is not None]
    is_added = getattr(attention, "add_q_proj", None) is not None
    if not existing:
        return norms
    if len(existing) != (4 if is_added else 2) or {(norm.kind, norm.eps) for norm in existing} != {
        ("rms", existing[0].eps)
    }:
        raise CannotSwapError("norms of queries and keys that are not of one kind")
    return norms


def _joint(attention: Any, streams: list[AttentionStream], norm: NormSpec | None) -> list[Tensor]:
    eps = EPS if norm is None else norm.eps
    return joint_attention(streams, attention.heads, eps=eps, norm=norm is not None)[0]


def _weight(norm: NormSpec | None) -> Tensor | None:
    return None if norm is None else norm.weight
