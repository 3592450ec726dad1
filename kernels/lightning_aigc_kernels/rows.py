"""Tokens as the rows of a matrix, and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rows_of(tokens: Tensor) -> Tensor:
    """Flatten all dimensions but the last."""
    return tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])  # -1 would not do for an empty tensor


def in_shape_of(x: Tensor, rows: Tensor) -> Tensor:
    """Give an op's result rows [R, D] the leading dimensions of x [..., C].

    What an autograd.Function returns as a view may not be changed in place; the result is none, as it alone has this
    memory.
    """
    result: Tensor = torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[-1]))
    return result
