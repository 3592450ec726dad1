"""Matrix products, rounded once to their operands' dtype; on a CPU float16 products are computed in float32.

On a CPU without float16 arithmetic, torch's float16 products are 17 times slower than float32 (1024 x 320 x 320), and
convolutions up to a thousand times (torch 2.13, 320 channels at 64 x 64: 28 s).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def needs_float32(like: Tensor) -> bool:
    """Whether to compute products of this tensor in float32 and round them."""
    return like.dtype is torch.float16 and like.device.type == "cpu"


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a b."""
    if needs_float32(a):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias."""
    if needs_float32(x):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


def add_matmul_(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """total += scale * a b, in place, accumulated inside the product where the device supports it."""
    if needs_float32(total):
        return total.copy_(torch.addmm(total.float(), a.float(), b.float(), alpha=scale))
    return total.addmm_(a, b, alpha=scale)


def rows_of(tokens: Tensor) -> Tensor:
    """Flatten all dimensions except the last."""
    return tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])  # -1 fails for an empty tensor


def in_shape_of(x: Tensor, rows: Tensor) -> Tensor:
    """Reshape an op's result rows [R, D] to the leading dimensions of x [..., C].

    A view returned by an autograd.Function may not be changed in place, so this is not marked as a view; nothing else
    uses the memory of `rows`.
    """
    result: Tensor = torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[-1]))
    return result
