"""Attention with a sparse backward in plain torch: autograd with hooks that sparsify dq, dk and dv."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.keep_largest.op import keep_largest_per_head


def sparse_attention_backward(q_NHTD: Tensor, k_NHSD: Tensor, v_NHSD: Tensor, density: float = 1.0) -> Tensor:
    """softmax(q k^T / sqrt(D)) v whose dq, dk and dv keep the largest `density` of each sample's head."""
    return F.scaled_dot_product_attention(_cut(q_NHTD, density), _cut(k_NHSD, density), _cut(v_NHSD, density))


def _cut(tensor: Tensor, density: float) -> Tensor:
    if density == 1 or not tensor.requires_grad:
        return tensor
    view = tensor.view_as(tensor)  # a hook on the tensor itself would persist
    view.register_hook(partial(keep_largest_per_head, density=density))  # type: ignore[no-untyped-call]
    return view
