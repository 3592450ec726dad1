"""Attention whose backward drops the smallest entries of dq, dk and dv per head: lossy, for experiments.

At density 1 it is bit-identical to torch's attention. Below 1 the gradients of q, k and v are biased: dropped entries
are lost (there is no error feedback), and small, consistent gradients are lost first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import check_density, compute_dtype, refuse_functorch, without_autocast
from lightning_aigc_kernels.keep_largest.op import keep_largest_per_head
from lightning_aigc_kernels.lora_attention.core import attend, attend_backward


def sparse_attention_backward(q_NHTD: Tensor, k_NHSD: Tensor, v_NHSD: Tensor, density: float = 1.0) -> Tensor:
    """softmax(q k^T / sqrt(D)) v whose dq, dk and dv keep the largest `density` of their entries per sample and head.

    Returns: [N, H, T, D]; density 1 calls scaled_dot_product_attention.
    Raises: ValueError for a density outside (0, 1] or shapes that are not [N, H, T, D]; RuntimeError under torch.func.
    """
    refuse_functorch("sparse_attention_backward")
    check_density(density, "density")
    q, k, v = q_NHTD.shape, k_NHSD.shape, v_NHSD.shape
    if not len(q) == len(k) == len(v) == 4 or not (q[:2] == k[:2] == v[:2] and q[3] == k[3] and k[2] == v[2]):
        got = ", ".join(str(tuple(shape)) for shape in (q, k, v))
        raise ValueError(f"sparse_attention_backward wants q [N, H, T, D], k and v [N, H, S, D], got {got}")
    if not q_NHTD.dtype == k_NHSD.dtype == v_NHSD.dtype and not torch.is_autocast_enabled(q_NHTD.device.type):
        got = ", ".join(str(t.dtype) for t in (q_NHTD, k_NHSD, v_NHSD))
        raise ValueError(f"sparse_attention_backward wants q, k and v of one dtype, got {got}; use autocast")
    if density == 1:
        return F.scaled_dot_product_attention(q_NHTD, k_NHSD, v_NHSD)
    dtype = compute_dtype(q_NHTD)
    with without_autocast(q_NHTD):
        o_NHTD: Tensor = _call(q_NHTD.to(dtype), k_NHSD.to(dtype), v_NHSD.to(dtype), density)[0]
    return o_NHTD


@torch.library.custom_op("lightning_aigc::sparse_attention_backward", mutates_args=())
def _op(q: Tensor, k: Tensor, v: Tensor, density: float) -> tuple[Tensor, Tensor, Tensor]:
    return attend(q, k, v)


@torch.library.custom_op("lightning_aigc::sparse_attention_backward_backward", mutates_args=())
def _backward_op(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, softmax1: Tensor, softmax2: Tensor, density: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (keep_largest_per_head(d, density) for d in attend_backward(do, q, k, v, o, softmax1, softmax2))
    return dq, dk, dv


_op.register_fake(_op._init_fn)


@_backward_op.register_fake
def _(do, q, k, v, o, softmax1, softmax2, density):  # type: ignore[no-untyped-def]
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.density = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, do: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if do is None:
        return None, None, None, None
    return *_call_backward(do, *ctx.saved_tensors, ctx.density), None


_call, _call_backward = register_autograd(_op, _backward_op, _setup_context, _autograd)


def sparse_attention_backward_reference(q_NHTD: Tensor, k_NHSD: Tensor, v_NHSD: Tensor, density: float = 1.0) -> Tensor:
    """Compute `sparse_attention_backward` in plain torch: hooks sparsify dq, dk and dv."""
    return F.scaled_dot_product_attention(_cut(q_NHTD, density), _cut(k_NHSD, density), _cut(v_NHSD, density))


def _cut(tensor: Tensor, density: float) -> Tensor:
    if density == 1 or not tensor.requires_grad:
        return tensor
    view = tensor.view_as(tensor)  # a hook on the tensor itself would persist
    view.register_hook(partial(keep_largest_per_head, density=density))  # type: ignore[no-untyped-call]
    return view
