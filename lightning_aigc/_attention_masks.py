"""Full shapes for masks of torch's own attention on an NPU.

CANN's attention takes masks [N, H, T, S], [N, 1, T, S], [1, 1, T, S] and [T, S] with both lengths written out, and no
[N, 1, 1, S], which diffusers and transformers make for padded texts. torch_npu's source expands such masks since August
2026; older ones pass them on. Expanding here serves all versions, and can go when torch_npu 2.13 is not supported any
more. Source: op-plugin 517f2e7, ScaledDotProductAttentionKernelNpuOpApi.cpp, and torch_npu-npu_fusion_attention.md.

Dimensions: N samples, H heads, T queries, S keys.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from torch import Tensor
from torch.nn import functional


def expand_masks() -> None:
    """Let `scaled_dot_product_attention` expand masks on an NPU, once; does nothing without torch_npu."""
    stock = functional.scaled_dot_product_attention
    if hasattr(stock, "__wrapped__") or importlib.util.find_spec("torch_npu") is None:
        return

    @functools.wraps(stock)
    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **options: Any
    ) -> Any:
        if attn_mask is not None and query.device.type == "npu":
            attn_mask = full_mask(attn_mask, query, key)
        return stock(query, key, value, attn_mask, *args, **options)

    functional.scaled_dot_product_attention = attention


def full_mask(mask: Tensor, query_NHTD: Tensor, key_NHSD: Tensor) -> Tensor:
    """Return a view of the mask in a shape that CANN takes; other masks and tensors without heads stay as they are."""
    if query_NHTD.dim() != 4 or not 2 <= mask.dim() <= 4:
        return mask
    samples, heads, queries, _ = query_NHTD.shape
    lengths = (queries, key_NHSD.shape[2])
    if mask.dim() == 2:
        return mask.expand(lengths)
    own_heads = mask.shape[-3]
    if mask.dim() == 4 and own_heads == 1:
        return mask.expand(len(mask), 1, *lengths)
    return mask.expand(samples, heads, *lengths)
