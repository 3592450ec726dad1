"""SwiGLU by torch_npu's `npu_swiglu`, for the two halves of a contiguous projection, gate first.

Its gradient is one tensor of both halves, which the op's contract wants apart: two copies that the Triton kernel does
not make, so it computes where no Triton kernel can be launched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_aigc_kernels.dispatch import has_npu_ops


def projection_for(gate: Tensor, up: Tensor) -> Tensor | None:
    """The projection of which gate and up are halves, where torch_npu computes it."""
    on_npu = gate.device.type == "npu" and has_npu_ops("npu_swiglu", "npu_swiglu_backward")
    return joined_halves(gate, up) if on_npu else None


def joined_halves(gate: Tensor, up: Tensor) -> Tensor | None:
    """The contiguous projection [..., 2 D] whose first half is gate and second half up; None if there is none."""
    if gate.dim() < 2 or gate.numel() == 0 or gate.untyped_storage()._cdata != up.untyped_storage()._cdata:
        return None
    wide = torch.Size((*gate.shape[:-1], 2 * gate.shape[-1]))
    strides = torch.empty(wide, device="meta").stride()
    adjacent = up.storage_offset() == gate.storage_offset() + gate.shape[-1]
    if not adjacent or gate.stride() != strides or up.stride() != strides:
        return None
    return gate.as_strided(wide, strides)


def forward(projection: Tensor) -> Tensor:
    """silu(gate) * up of the projection's halves."""
    product: Tensor = torch.ops.npu.npu_swiglu(projection, -1)
    return product


def backward(
    dproduct: Tensor, projection: Tensor, need_gate: bool, need_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The needed gradients of gate and up, contiguous."""
    dgate, dup = torch.ops.npu.npu_swiglu_backward(dproduct.contiguous(), projection, -1).chunk(2, dim=-1)
    return dgate.contiguous() if need_gate else None, dup.contiguous() if need_up else None
