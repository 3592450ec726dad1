"""The attentions of diffusers' transformers, over the streams of text and picture, as one fused op.

Projections are the module's own layers, so that any adapter on them works; between them and the output projections is
`joint_attention`. Rotary positions are computed in real numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_aigc.precision.layers import CannotSwapError, class_path, refuse_hooks
from lightning_aigc_kernels import Stream, joint_attention, rotary_from_complex, rotary_from_repeated, silu_mul

PROCESSORS = frozenset({
    "diffusers.models.attention_processor.JointAttnProcessor2_0",
    "diffusers.models.transformers.transformer_flux.FluxAttnProcessor",
    "diffusers.models.transformers.transformer_flux2.Flux2AttnProcessor",
    "diffusers.models.transformers.transformer_flux2.Flux2ParallelSelfAttnProcessor",
    "diffusers.models.transformers.transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0",
    "diffusers.models.transformers.transformer_z_image.ZSingleStreamAttnProcessor",
    "lightning_aigc.precision.equal_tokens.EqualTokensProcessor",
})  # fmt: skip
SWIGLU = "diffusers.models.transformers.transformer_flux2.Flux2SwiGLU"
RMS_NORMS = ("diffusers.models.normalization.RMSNorm", "torch.nn.modules.normalization.RMSNorm")
EPS = 1e-6
"""Where nothing is normalised, any."""
Rotary = tuple[Tensor, Tensor]


class NormOf(NamedTuple):
    """What a norm over the last dimension computes."""

    kind: str
    """layer or rms."""
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def read_norm(module: Any) -> NormOf:
    """The tensors of a LayerNorm or RMSNorm over the last dimension. Raises: CannotSwapError for any other norm."""
    refuse_hooks(module)
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return NormOf("layer", module.weight, module.bias, module.eps)
    if class_path(module) in RMS_NORMS and module.eps is not None and getattr(module, "bias", None) is None:
        return NormOf("rms", module.weight, None, module.eps)
    raise CannotSwapError(f"{class_path(module)} is not a norm that a fused op supports")


def check_attention(attention: Any) -> None:
    """Raise CannotSwapError unless this attention is computed as its class's own processor does."""
    refuse_hooks(attention)
    processor = attention.processor
    if class_path(processor) not in PROCESSORS:
        raise CannotSwapError(f"the attention processor {type(processor).__name__}")
    if getattr(processor, "_attention_backend", None) or getattr(processor, "_parallel_config", None):
        raise CannotSwapError("an attention backend that was chosen, or context parallelism")
    if getattr(attention, "fused_projections", False):
        raise CannotSwapError("fused projections")
    _norms(attention)


def attend(
    attention: Any,
    picture: Tensor,
    text: Tensor | None = None,
    picture_rotary: Rotary | None = None,
    text_rotary: Rotary | None = None,
    picture_first: bool = False,
    picture_bias: Tensor | None = None,
    text_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The attention's output for each stream, through its output projections where it has them.

    Args: picture [N, T, C] and text [N, S, C], each with cos and sin for its tokens and a bias of its keys; unset, the
            text's is what the processor's `text_bias` says, if it has one.
    """
    query_norm, key_norm, added_query_norm, added_key_norm = _norms(attention)
    cos, sin = picture_rotary or (None, None)
    streams = [
        Stream(
            attention.to_q(picture), attention.to_k(picture), attention.to_v(picture),
            _weight(query_norm), _weight(key_norm), cos, sin, picture_bias,
        )
    ]  # fmt: skip
    if text is not None:
        if text_bias is None and (bias := getattr(attention.processor, "text_bias", None)):
            text_bias = bias(text)
        cos, sin = text_rotary or (None, None)
        stream = Stream(
            attention.add_q_proj(text), attention.add_k_proj(text), attention.add_v_proj(text),
            _weight(added_query_norm), _weight(added_key_norm), cos, sin, text_bias,
        )  # fmt: skip
        streams.insert(1 if picture_first else 0, stream)
    outputs = _joint(attention, streams, query_norm)
    picture_out = outputs[0 if picture_first or text is None else 1]
    text_out = None if text is None else outputs[1 if picture_first else 0]
    if not getattr(attention, "pre_only", False):
        for layer in attention.to_out:
            picture_out = layer(picture_out)
    if text_out is not None and not getattr(attention, "context_pre_only", None):
        text_out = attention.to_add_out(text_out)
    return picture_out, text_out


def attend_in_parallel(attention: Any, x: Tensor, rotary: Rotary | None) -> Tensor:
    """FLUX.2's attention with its feed-forward beside it: one projection to both, one from both."""
    query_norm, key_norm, _, _ = _norms(attention)
    width = attention.inner_dim
    projected = attention.to_qkv_mlp_proj(x)
    sizes = [width] * 3 + [attention.mlp_hidden_dim] * 2
    query, key, value, gate, up = torch.split(projected, sizes, dim=-1)
    stream = Stream(query, key, value, _weight(query_norm), _weight(key_norm), *(rotary or ()))
    (output,) = _joint(attention, [stream], query_norm)
    projected_back: Tensor = attention.to_out(torch.cat([output, silu_mul(gate, up)], dim=-1))
    return projected_back


def gated(layer: Any, x: Tensor) -> Tensor:
    """FLUX.2's feed-forward, whose first projection has gate and value side by side."""
    gate, up = layer.linear_in(x).chunk(2, dim=-1)
    y: Tensor = layer.linear_out(silu_mul(gate, up))
    return y


def rotary_of(given: Any, *tokens: int) -> list[Rotary | None]:
    """cos and sin for each stream, of the given numbers of tokens, from what diffusers hands to FLUX's blocks."""
    if given is None:
        return [None] * len(tokens)
    cos, sin = rotary_from_repeated(*given)
    return list(zip(torch.split(cos, list(tokens)), torch.split(sin, list(tokens)), strict=True))


def rotary_of_complex(given: Tensor | None, device: torch.device) -> Rotary | None:
    """cos and sin of complex rotations, as Z-Image's and Qwen-Image's blocks get them."""
    return None if given is None else rotary_from_complex(given, device)


def key_bias_of(mask: Tensor | None) -> Tensor | None:
    """The keys' bias of a mask [N, T], True for a token that takes part. Raises: CannotSwapError for any other mask."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise CannotSwapError(f"a mask of {mask.dtype} with {mask.dim()} dimensions")
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf)


def _norms(attention: Any) -> list[NormOf | None]:
    """The norms of queries and keys, and of added ones. Raises: CannotSwapError unless all that there are are alike."""
    names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    modules = [getattr(attention, name, None) for name in names]
    norms = [None if module is None else read_norm(module) for module in modules]
    there = [norm for norm in norms if norm is not None]
    is_added = getattr(attention, "add_q_proj", None) is not None
    if there and (
        len(there) != (4 if is_added else 2) or {(norm.kind, norm.eps) for norm in there} != {("rms", there[0].eps)}
    ):
        raise CannotSwapError("norms of queries and keys that are not of one kind")
    return norms


def _joint(attention: Any, streams: list[Stream], norm: NormOf | None) -> list[Tensor]:
    eps = EPS if norm is None else norm.eps
    return joint_attention(streams, attention.heads, eps=eps, norm=norm is not None)[0]


def _weight(norm: NormOf | None) -> Tensor | None:
    return None if norm is None else norm.weight
