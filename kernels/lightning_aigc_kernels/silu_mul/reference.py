"""SwiGLU of two tensors in plain torch, the reference of the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, with torch's autograd."""
    return F.silu(gate) * up


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, contiguous."""
    return F.silu(gate).mul_(up).contiguous()


def backward(
    dproduct: Tensor, gate: Tensor, up: Tensor | None, need_gate: bool, need_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The needed gradients of gate and up, contiguous; `up` may be None if the gate's is not needed."""
    dgate = dup = None
    if need_gate and up is not None:
        dgate = aten.silu_backward(dproduct * up, gate).contiguous()
    if need_up:
        dup = F.silu(gate).mul_(dproduct).contiguous()
    return dgate, dup
