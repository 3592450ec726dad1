"""Reshape tokens to the rows of a matrix and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
