"""GEGLU and SwiGLU in plain torch, the reference of the kernels.

Dimensions: R rows (tokens), D features; a row of the projection has D values, then D gates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def geglu(projected: Tensor) -> Tensor:
    """value * gelu(gate) of [..., 2 D], with torch's autograd."""
    value, gate = projected.chunk(2, dim=-1)
    return value * F.gelu(gate)


def swiglu(projected: Tensor) -> Tensor:
    """value * silu(gate) of [..., 2 D], with torch's autograd."""
    value, gate = projected.chunk(2, dim=-1)
    return value * F.silu(gate)


def forward(projected_R2D: Tensor, activation: str) -> Tensor:
    """value * act(gate), in the projection's dtype."""
    value_RD, gate_RD = projected_R2D.chunk(2, dim=-1)
    # On a CPU, gelu of the strided half takes three times as long as of a copy.
    return _activate(gate_RD.contiguous(), activation).mul_(value_RD)


def backward(
    dproduct_RD: Tensor, projected_R2D: Tensor, activation: str, need_product: bool
) -> tuple[Tensor, Tensor | None]:
    """The projection's gradient, and with `need_product` the recomputed product."""
    value_RD, gate_RD = (half.contiguous() for half in projected_R2D.chunk(2, dim=-1))
    dprojected_R2D = torch.empty_like(projected_R2D)
    dvalue_RD, dgate_RD = dprojected_R2D.chunk(2, dim=-1)
    activated_RD = _activate(gate_RD, activation)
    torch.mul(dproduct_RD, activated_RD, out=dvalue_RD)
    product_RD = activated_RD.mul_(value_RD) if need_product else None
    slope = aten.gelu_backward if activation == "gelu" else aten.silu_backward
    dgate_RD.copy_(slope(value_RD * dproduct_RD, gate_RD))
    return dprojected_R2D, product_RD


def _activate(gate_RD: Tensor, activation: str) -> Tensor:
    return F.gelu(gate_RD) if activation == "gelu" else F.silu(gate_RD)
