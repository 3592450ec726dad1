"""One attention over the tokens of several streams, with the norm and rotation of queries and keys, as one op.

Native autograd saves the normalised, the rotated and the joined queries and keys and the projections, about nine
activations of the input's size. This op saves the projections as given and the attention's output with its softmax,
four; backward repeats norm and rotation. The projections are the caller's layers, so any LoRA on them works.

On npu the attention is torch_npu's npu_fusion_attention, on cuda torch's flash or memory-efficient one; with a
stream's `key_bias` the latter.

Dimensions: N samples, H heads, T tokens of a stream, D features of a head, C = H D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import compute_dtype, refuse_functorch, without_autocast
from lightning_aigc_kernels.joint_attention import passes
from lightning_aigc_kernels.joint_attention.stream import AttentionStream, check_streams
from lightning_aigc_kernels.packing import empty_wanted, pack, spread, unpack, wanted
from lightning_aigc_kernels.qk_norm_rope.reference import qk_norm_rope as qk_norm_rope_reference

FIELDS = len(AttentionStream._fields)


def joint_attention(
    streams: Sequence[AttentionStream],
    heads: int,
    *,
    eps: float = 1e-6,
    norm: bool = True,
    known: tuple[Tensor, ...] | None = None,
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """softmax(q k^T / sqrt(D) + bias) v over all streams' tokens in their order, with q and k through `qk_norm_rope`.

    Args: streams of the same N and C; a single one is a list of one. `norm=False` leaves out the norm of every query
        and key. `known`, what an earlier pass of the same inputs gave, skips the attention.
    Returns: each stream's output [N, T, C], in autocast's dtype if it is enabled, else the first query's; and for
        `known` the same with the two softmax tensors behind, without gradients.
    Raises: ValueError if the streams do not fit; RuntimeError under torch.func.
    """
    refuse_functorch("joint_attention")
    check_streams(streams, heads, eps, norm)
    if known is not None and len(known) != len(streams) + 2:
        raise ValueError(f"known must be an output for each of {len(streams)} streams and two more, got {len(known)}")
    tensors, given = pack(tensor for stream in streams for tensor in stream)
    dtype = compute_dtype(streams[0].query)
    with without_autocast(streams[0].query):
        made = _call(tensors, given, list(known or ()), heads, eps, norm, dtype)
    return list(made[:-2]), tuple(tensor.detach() for tensor in made)


def _joint(
    tensors: Sequence[Tensor], given: Sequence[bool], heads: int, eps: float, norm: bool, dtype: torch.dtype
) -> passes.Joint:
    """Undo the packing of the streams."""
    fields = unpack(tensors, given)
    streams = [AttentionStream(*fields[i : i + FIELDS]) for i in range(0, len(fields), FIELDS)]
    return passes.Joint(streams, heads, eps, norm, dtype)


@torch.library.custom_op("lightning_aigc::joint_attention", mutates_args=())
def _op(
    tensors: list[Tensor],
    given: list[bool],
    known: list[Tensor],
    heads: int,
    eps: float,
    norm: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Each stream's output, then the two softmax tensors."""
    if known:  # copies, because an op's result is not what was given; the caller may free the given ones
        return [tensor.clone() for tensor in known]
    return passes.forward(_joint(tensors, given, heads, eps, norm, dtype))


@_op.register_fake
def _(tensors, given, known, heads, eps, norm, dtype):  # type: ignore[no-untyped-def]
    if known:
        return [torch.empty_like(tensor) for tensor in known]
    return passes.forward_fake(_joint(tensors, given, heads, eps, norm, dtype))


@torch.library.custom_op("lightning_aigc::joint_attention_backward", mutates_args=())
def _backward_op(
    do: list[Tensor],
    do_given: list[bool],
    tensors: list[Tensor],
    given: list[bool],
    made: list[Tensor],
    needs: list[bool],
    heads: int,
    eps: float,
    norm: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The gradients of the tensors that `needs` selects; `made` is the forward's result."""
    joint = _joint(tensors, given, heads, eps, norm, dtype)
    all_needs = unpack(needs, given, absent=False)
    *outputs, softmax1, softmax2 = made
    gradients = passes.backward(unpack(do, do_given), joint, outputs, (softmax1, softmax2), all_needs)
    return wanted(gradients, unpack(tensors, given), all_needs)


@_backward_op.register_fake
def _(do, do_given, tensors, given, made, needs, *options):  # type: ignore[no-untyped-def]
    return empty_wanted(tensors, needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.given, known, *ctx.options = inputs
    ctx.known = len(known)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[0])
    nothing = None, [None] * ctx.known, None, None, None, None
    do, do_given = pack(grads[:-2])
    if not do:
        return [None] * len(needs), *nothing
    saved = ctx.saved_tensors  # read once: under checkpointing a second read is an error
    tensors, made = list(saved[: len(needs)]), list(saved[len(needs) :])
    gradients = iter(_call_backward(do, do_given, tensors, ctx.given, made, needs, *ctx.options))
    return spread(gradients, needs), *nothing


_call, _call_backward = register_autograd(_op, _backward_op, _setup_context, _autograd)


def joint_attention_reference(
    streams: Sequence[AttentionStream], heads: int, *, eps: float = 1e-6, norm: bool = True
) -> tuple[Tensor, ...]:
    """Compute the output of each stream as diffusers' processors do, in plain torch with its autograd."""
    q = [_prepared(s.query, s.query_weight, s, heads, eps, norm) for s in streams]
    k = [_prepared(s.key, s.key_weight, s, heads, eps, norm) for s in streams]
    v = [_of_heads(s.value, heads) for s in streams]
    q_NHSD, k_NHSD, v_NHSD = (torch.cat(tokens, 1).transpose(1, 2) for tokens in (q, k, v))
    o_NHSD = F.scaled_dot_product_attention(q_NHSD, k_NHSD, v_NHSD, _mask(streams, q_NHSD.dtype))
    o_NSC = o_NHSD.transpose(1, 2).flatten(2)
    return torch.split(o_NSC, [s.query.shape[1] for s in streams], 1)


def _prepared(x: Tensor, weight: Tensor | None, stream: AttentionStream, heads: int, eps: float, norm: bool) -> Tensor:
    return qk_norm_rope_reference(_of_heads(x, heads), weight, stream.cos, stream.sin, eps=eps, norm=norm)


def _mask(streams: Sequence[AttentionStream], dtype: torch.dtype) -> Tensor | None:
    """The keys' biases, [N, 1, 1, S] in float32 or what is wider."""
    if all(s.key_bias is None for s in streams):
        return None
    rows = [s.query.new_zeros(s.query.shape[:2], dtype=torch.float32) for s in streams]
    rows = [row if s.key_bias is None else row + s.key_bias for row, s in zip(rows, streams, strict=True)]
    return torch.cat(rows, 1)[:, None, None].to(torch.promote_types(dtype, torch.float32))


def _of_heads(x_NTC: Tensor, heads: int) -> Tensor:
    return x_NTC.reshape(*x_NTC.shape[:-1], heads, x_NTC.shape[-1] // heads)
