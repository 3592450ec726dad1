"""Matrix products, each rounded once to its operands' dtype; float16 on a CPU by way of float32.

A CPU without float16 arithmetic runs torch's float16 products 17 times (1024 x 320 x 320) and its convolutions up to a
thousand times slower than float32 ones (torch 2.13, 320 channels at 64 x 64: 28 s).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def needs_float32(like: Tensor) -> bool:
    """Whether products of this tensor are better computed in float32 and rounded."""
    return like.dtype == torch.float16 and like.device.type == "cpu"


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
    """total += scale * a b, in place, the sum growing inside the product where the device can."""
    if needs_float32(total):
        return total.copy_(torch.addmm(total.float(), a.float(), b.float(), alpha=scale))
    return total.addmm_(a, b, alpha=scale)
