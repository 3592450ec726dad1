"""The tokens of one kind, such as text or image, that take part in a joint attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_aigc_kernels.qk_norm_rope.norm_rope import NormRope, check


class AttentionStream(NamedTuple):
    """A stream's projections [N, T, H * D], and the norm and rotation of its queries and keys, as in `qk_norm_rope`."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_weight: Tensor | None = None
    """Weight of the queries' norm, [D]."""
    key_weight: Tensor | None = None
    cos: Tensor | None = None
    """[T, D/2] or [N, T, D/2], for queries and keys; None for no rotation."""
    sin: Tensor | None = None
    key_bias: Tensor | None = None
    """[N, T] or [1, T] in float32, added to every query's logits for this stream's keys; None is zeros.

    -inf leaves a token out, log(n) counts it n times. In each sample some stream must have a key left. No gradient."""

    def of_query(self, eps: float, norm: bool) -> NormRope:
        """Return the norm and rotation of the queries."""
        return NormRope(self.query_weight, self.cos, self.sin, eps, norm)

    def of_key(self, eps: float, norm: bool) -> NormRope:
        """Return the norm and rotation of the keys."""
        return NormRope(self.key_weight, self.cos, self.sin, eps, norm)


def check_streams(streams: Sequence[AttentionStream], heads: int, eps: float, norm: bool) -> None:
    """Raise ValueError for streams that do not fit each other or the number of heads."""
    if not streams:
        raise ValueError("joint_attention wants at least one stream, got none")
    first = streams[0].query.shape
    for i, stream in enumerate(streams):
        shapes = [tuple(t.shape) for t in (stream.query, stream.key, stream.value)]
        if len({*shapes}) > 1 or len(shapes[0]) != 3 or shapes[0] != (first[0], shapes[0][1], first[-1]):
            wanted = "query, key and value [N, T, H * D], with one N and H * D for all streams"
            raise ValueError(f"joint_attention wants {wanted}, got {', '.join(map(str, shapes))} in stream {i}")
        samples, tokens, width = shapes[0]
        if heads < 1 or width % heads:
            raise ValueError(f"heads must divide the features, got {heads} heads for {width} features")
        sizes = (samples, tokens, heads, width // heads)
        check(f"joint_attention's stream {i}", sizes, stream.of_query(eps, norm))
        check(f"joint_attention's stream {i}", sizes, stream.of_key(eps, norm))
        if stream.key_bias is not None:
            _check_key_bias(i, stream.key_bias, samples, tokens)


def _check_key_bias(stream: int, bias: Tensor, samples: int, tokens: int) -> None:
    op = f"joint_attention's stream {stream}"
    if bias.dtype != torch.float32 or bias.shape not in ((samples, tokens), (1, tokens)):
        wanted, got = f"{(samples, tokens)} or {(1, tokens)} in float32", f"{tuple(bias.shape)} in {bias.dtype}"
        advice = "; of a mask: torch.where(mask, 0.0, -torch.inf)" if bias.dtype == torch.bool else ""
        raise ValueError(f"{op} wants a key_bias {wanted}, got {got}{advice}")
    if bias.requires_grad:
        raise ValueError(f"{op} gives key_bias no gradient, got one that wants it; use key_bias.detach()")
