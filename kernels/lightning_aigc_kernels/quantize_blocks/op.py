"""Quantize blocks to few-bit integers, and read or add them, for compressed gradients; without autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.custom_op import is_traced
from lightning_aigc_kernels.dispatch import cpu_kernel_for, kernel_for
from lightning_aigc_kernels.quantize_blocks import reference
from lightning_aigc_kernels.quantize_blocks.layout import check

OP = "quantize_blocks"


def quantize_blocks(values_RN: Tensor, packed_RB: Tensor, bits: int) -> None:
    """Write the rows of values_RN into packed_RB, and leave the quantization error in values_RN.

    Args: values_RN is float32, packed_RB uint8 with `packed_bytes(N, bits)` a row, both contiguous; bits: 3, 4 or 8.
    Raises: ValueError for what does not fit.
    """
    check(values_RN, packed_RB, bits)
    _implementation(values_RN).quantize_blocks(values_RN, packed_RB, bits)


def dequantize_blocks(packed_RB: Tensor, out_RN: Tensor, bits: int) -> Tensor:
    """Write the values of packed_RB to out_RN.

    Returns: the largest magnitude of a scale, which is finite when every value is.
    Raises: ValueError as `quantize_blocks`.
    """
    check(out_RN, packed_RB, bits)
    largest: Tensor = _implementation(out_RN).dequantize_blocks(packed_RB, out_RN, bits)
    return largest


def add_quantized_rows(packed_RB: Tensor, out_N: Tensor, bits: int) -> None:
    """Add the values of all rows of packed_RB to out_N, row after row.

    Raises: ValueError as `quantize_blocks`.
    """
    check(out_N, packed_RB, bits)
    _implementation(out_N).add_quantized_rows(packed_RB, out_N, bits)


def _implementation(values: Tensor) -> Any:
    """Return the Triton kernel, the CPU's, or the reference, whose operators alone a dispatch mode sees."""
    kernel = part_kernel(values.device) if values.device.type == "cpu" else kernel_for(OP, values)
    return reference if kernel is None else kernel


def part_kernel(device: torch.device) -> Any | None:
    """Return the kernel module with `quantize_part` and `dequantize_part`, where there is one: on a CPU with Numba."""
    return cpu_kernel_for(OP) if device.type == "cpu" and not is_traced() else None
