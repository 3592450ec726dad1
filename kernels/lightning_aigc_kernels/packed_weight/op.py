"""Unpack a packed weight, on the device where its bytes are; without autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.custom_op import is_traced
from lightning_aigc_kernels.dispatch import KERNEL_DTYPES, cpu_kernel_for, kernel_for
from lightning_aigc_kernels.packed_weight import reference
from lightning_aigc_kernels.packed_weight.reference import Format

OP = "packed_weight"
CPU_KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""float16 is not among Numba's types of a CPU."""


def unpack_weight(packed: Tensor, scales: Tensor, kind: Format, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Unpack the weight of this shape to `dtype`, bit-identical on every device.

    Args: packed [B, S] and scales [B], as `reference.pack` returns them.
    """
    if is_traced():
        # torch.compile merges equal calls, and would save the unpacked weight from forward to backward.
        in_backward = torch._C._current_graph_task_id() >= 0
        weight: Tensor = _op(packed, scales, kind, list(shape), dtype, in_backward)
        return weight
    return _unpack(packed, scales, kind, shape, dtype)


def _unpack(packed: Tensor, scales: Tensor, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    implementation = reference if kind == "fp8" else _implementation(scales, dtype)
    flat: Tensor = implementation.unpack(packed, scales, kind, dtype)
    return flat[: math.prod(shape)].view(tuple(shape))


def _implementation(scales: Tensor, dtype: torch.dtype) -> Any:
    """Return the Triton kernel, the CPU's, or the reference."""
    kernel = None
    if scales.device.type == "cpu" and dtype in CPU_KERNEL_DTYPES:
        kernel = cpu_kernel_for(OP)
    elif dtype in KERNEL_DTYPES:
        kernel = kernel_for(OP, scales)
    return reference if kernel is None else kernel


@torch.library.custom_op("lightning_aigc::unpack_weight", mutates_args=())
def _op(packed: Tensor, scales: Tensor, kind: str, shape: list[int], dtype: torch.dtype, in_backward: bool) -> Tensor:
    return _unpack(packed, scales, kind, shape, dtype)


@_op.register_fake
def _(packed, scales, kind, shape, dtype, in_backward):  # type: ignore[no-untyped-def]
    return packed.new_empty(shape, dtype=dtype)
