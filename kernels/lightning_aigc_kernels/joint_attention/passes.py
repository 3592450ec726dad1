"""Forward and backward of a joint attention, without autograd.

Dimensions: N samples, H heads, T tokens of a stream, S tokens of all streams, D features of a head, C = H D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_aigc_kernels.joint_attention.stream import AttentionStream
from lightning_aigc_kernels.lora_attention.core import attend, attend_backward
from lightning_aigc_kernels.qk_norm_rope import op as qk_norm_rope
from lightning_aigc_kernels.qk_norm_rope.norm_rope import NormRope


@dataclass(frozen=True)
class Joint:
    """The streams of a joint attention, and the dtype of its products."""

    streams: Sequence[AttentionStream]
    heads: int
    eps: float
    norm: bool
    dtype: torch.dtype

    @property
    def queries(self) -> list[tuple[Tensor, NormRope]]:
        """Each stream's query, and what is done to it."""
        return [(s.query, s.of_query(self.eps, self.norm)) for s in self.streams]

    @property
    def keys(self) -> list[tuple[Tensor, NormRope]]:
        """Each stream's key, and what is done to it."""
        return [(s.key, s.of_key(self.eps, self.norm)) for s in self.streams]

    @property
    def values(self) -> list[Tensor]:
        """Each stream's value."""
        return [s.value for s in self.streams]

    @property
    def key_bias(self) -> Tensor | None:
        """Bias of all streams' keys, [N, S] or [1, S]; None if no stream has one."""
        if all(s.key_bias is None for s in self.streams):
            return None
        zeros = [s.query.new_zeros((1, s.query.shape[1]), dtype=torch.float32) for s in self.streams]
        parts = [z if s.key_bias is None else s.key_bias for s, z in zip(self.streams, zeros, strict=True)]
        samples = 1 if all(part.shape[0] == 1 for part in parts) else self.streams[0].query.shape[0]
        return torch.cat([part.expand(samples, -1) for part in parts], 1)

    def of_heads(self, x_NTC: Tensor) -> Tensor:
        """[N, T, C] as [N, T, H, D]."""
        samples, tokens, features = x_NTC.shape
        return x_NTC.view(samples, tokens, self.heads, features // self.heads)


def forward(joint: Joint) -> list[Tensor]:
    """Each stream's output [N, T, C], then the two softmax tensors."""
    q, k, v = (_heads_first(x) for x in _joined(joint))
    o_NHSD, *softmax = attend(q, k, v, joint.key_bias)
    return [*_split(o_NHSD, joint), *softmax]


def forward_fake(joint: Joint) -> list[Tensor]:
    """`forward` on tensors without values: the kernel of norm and rotation is not called."""
    like = _unwritten(joint)
    _, *softmax = attend(*(_heads_first(like),) * 3, joint.key_bias)
    return [*(s.query.new_empty(s.query.shape, dtype=joint.dtype) for s in joint.streams), *softmax]


def backward(
    do: Sequence[Tensor | None],
    joint: Joint,
    outputs: Sequence[Tensor],
    softmax: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of each stream's query, key, value, query_weight and key_weight, and three times None.

    Args: do is None for a stream whose output nobody used; outputs and softmax are `forward`'s; needs selects among
        each stream's eight.
    """
    pairs = zip(do, outputs, strict=True)
    do_NSHD = _concatenated([torch.zeros_like(o) if d is None else d for d, o in pairs], joint)
    q, k, v = (_heads_first(x) for x in _joined(joint))
    o_NHSD = _heads_first(_concatenated(outputs, joint))
    softmax1, softmax2 = softmax
    dqkv_NHSD = attend_backward(_heads_first(do_NSHD), q, k, v, o_NHSD, softmax1, softmax2, joint.key_bias)
    dqkv = [d.transpose(1, 2) for d in dqkv_NHSD]
    del do_NSHD, q, k, v, o_NHSD  # frees memory for the gradients of the streams

    gradients: list[Tensor | None] = []
    for i, (stream, part) in enumerate(zip(joint.streams, _places(joint), strict=True)):
        first = i * len(AttentionStream._fields)
        need_q, need_k, need_v, need_query_weight, need_key_weight = needs[first : first + 5]
        dq_NTHD, dk_NTHD, dv_NTHD = (d[:, part] for d in dqkv)
        dq, dquery_weight = _inward(dq_NTHD, *joint.queries[i], joint, need_q, need_query_weight)
        dk, dkey_weight = _inward(dk_NTHD, *joint.keys[i], joint, need_k, need_key_weight)
        dv = _copy(dv_NTHD, stream.value) if need_v else None
        gradients += [dq, dk, dv, dquery_weight, dkey_weight, None, None, None]
    return gradients


def _inward(
    dy_NTHD: Tensor, x_NTC: Tensor, how: NormRope, joint: Joint, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a query or key and its weight from that of the normalised and rotated one."""
    if not need_x and not need_weight:
        return None, None
    if how.changes_nothing:
        return _copy(dy_NTHD, x_NTC), None
    dx_NTHD, dweight = qk_norm_rope.backward(dy_NTHD, joint.of_heads(x_NTC), how, need_weight)
    return dx_NTHD.view(x_NTC.shape) if need_x else None, dweight


def _joined(joint: Joint) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised and rotated q and k, and v, of all streams, [N, S, H, D]."""
    q, k = _prepared(joint.queries, joint), _prepared(joint.keys, joint)
    return q, k, _concatenated(joint.values, joint)


def _prepared(given: Sequence[tuple[Tensor, NormRope]], joint: Joint) -> Tensor:
    """Queries or keys, normalised, rotated and written side by side, [N, S, H, D]."""
    if all(how.changes_nothing for _, how in given):
        return _concatenated([x_NTC for x_NTC, _ in given], joint)
    made = _unwritten(joint)
    for (x_NTC, how), part in zip(given, _places(joint), strict=True):
        if how.changes_nothing:
            made[:, part].copy_(joint.of_heads(x_NTC))
        else:
            qk_norm_rope.forward(joint.of_heads(x_NTC), how, made[:, part])
    return made


def _concatenated(parts_NTC: Sequence[Tensor], joint: Joint) -> Tensor:
    """[N, S, H, D] of the streams' tensors; a view where there is one stream in the right dtype."""
    cast = [part.to(joint.dtype) for part in parts_NTC]
    return joint.of_heads(cast[0] if len(cast) == 1 else torch.cat(cast, 1))


def _split(o_NHSD: Tensor, joint: Joint) -> list[Tensor]:
    """Each stream's [N, T, C], in memory of its own where there are several streams."""
    o_NSHD = o_NHSD.transpose(1, 2)
    if len(joint.streams) == 1:
        # Not marked as a view, which autograd would not let anybody change in place; nothing else uses the memory.
        return [torch.ops.aten._unsafe_view(o_NSHD.contiguous(), joint.streams[0].query.shape)]
    return [_copy(o_NSHD[:, part], s.query, joint.dtype) for s, part in zip(joint.streams, _places(joint), strict=True)]


def _copy(x_NTHD: Tensor, like_NTC: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous copy with the shape of `like`, in its dtype or another; never a view, as an op's results must be."""
    made = like_NTC.new_empty(like_NTC.shape, dtype=dtype or like_NTC.dtype)
    made.view(x_NTHD.shape).copy_(x_NTHD)
    return made


def _unwritten(joint: Joint) -> Tensor:
    """Memory for the joined queries or keys, [N, S, H, D]."""
    like = joint.streams[0].query
    tokens = sum(s.query.shape[1] for s in joint.streams)
    return joint.of_heads(like.new_empty((like.shape[0], tokens, like.shape[2]), dtype=joint.dtype))


def _places(joint: Joint) -> list[slice]:
    """Return the range of each stream's tokens among the joined ones."""
    ends = accumulate((s.query.shape[1] for s in joint.streams), initial=0)
    return [slice(start, end) for start, end in pairwise(ends)]


def _heads_first(x_NSHD: Tensor) -> Tensor:
    return x_NSHD.transpose(1, 2)
