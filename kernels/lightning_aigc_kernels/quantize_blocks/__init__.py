"""Quantize blocks of values to few-bit integers, packed to bytes, and read or add them."""

from lightning_aigc_kernels.quantize_blocks.layout import BLOCK, GROUP, SCALE_BYTES, packed_bytes, scale_magnitude
from lightning_aigc_kernels.quantize_blocks.op import (
    add_quantized_rows,
    dequantize_blocks,
    part_kernel,
    quantize_blocks,
)

__all__ = [
    "BLOCK",
    "GROUP",
    "SCALE_BYTES",
    "add_quantized_rows",
    "dequantize_blocks",
    "packed_bytes",
    "part_kernel",
    "quantize_blocks",
    "scale_magnitude",
]
