"""Convolution and linear layer in plain torch, with torch's autograd."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def frozen_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """conv2d(x, weight, bias)."""
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(x, weight, bias)."""
    return F.linear(x, weight, bias)
