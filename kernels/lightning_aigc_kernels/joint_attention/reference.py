"""Attention over the tokens of several streams in plain torch, as diffusers' processors, with torch's autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.joint_attention.stream import AttentionStream
from lightning_aigc_kernels.qk_norm_rope.reference import qk_norm_rope


def joint_attention(
    streams: Sequence[AttentionStream], heads: int, *, eps: float = 1e-6, norm: bool = True
) -> tuple[Tensor, ...]:
    """The attention's output [N, T, H * D] of each stream."""
    q = [_prepared(s.query, s.query_weight, s, heads, eps, norm) for s in streams]
    k = [_prepared(s.key, s.key_weight, s, heads, eps, norm) for s in streams]
    v = [_of_heads(s.value, heads) for s in streams]
    q_NHSD, k_NHSD, v_NHSD = (torch.cat(tokens, 1).transpose(1, 2) for tokens in (q, k, v))
    o_NHSD = F.scaled_dot_product_attention(q_NHSD, k_NHSD, v_NHSD, _mask(streams, q_NHSD.dtype))
    o_NSC = o_NHSD.transpose(1, 2).flatten(2)
    return torch.split(o_NSC, [s.query.shape[1] for s in streams], 1)


def _prepared(x: Tensor, weight: Tensor | None, stream: AttentionStream, heads: int, eps: float, norm: bool) -> Tensor:
    return qk_norm_rope(_of_heads(x, heads), weight, stream.cos, stream.sin, eps=eps, norm=norm)


def _mask(streams: Sequence[AttentionStream], dtype: torch.dtype) -> Tensor | None:
    """The keys' biases, [N, 1, 1, S] in float32 or what is wider."""
    if all(s.key_bias is None for s in streams):
        return None
    rows = [s.query.new_zeros(s.query.shape[:2], dtype=torch.float32) for s in streams]
    rows = [row if s.key_bias is None else row + s.key_bias for row, s in zip(rows, streams, strict=True)]
    return torch.cat(rows, 1)[:, None, None].to(torch.promote_types(dtype, torch.float32))


def _of_heads(x_NTC: Tensor, heads: int) -> Tensor:
    return x_NTC.reshape(*x_NTC.shape[:-1], heads, x_NTC.shape[-1] // heads)
