"""Quantization: blocks of integers of 3, 4 or 8 bits that share a scale, packed to bytes.

The format and its kernels are `lightning_aigc_kernels.quantize_blocks`. A value that is not finite makes its block's
scale infinite, and with it every value that is decoded.

Dimensions: R rows of N values, each packed into B bytes; one row is sent to one rank.
"""

from __future__ import annotations

from torch import Tensor

from lightning_aigc_kernels.quantize_blocks import (
    BLOCK,
    GROUP,
    SCALE_BYTES,
    add_quantized_rows,
    dequantize_blocks,
    packed_bytes,
    quantize_blocks,
)

__all__ = ["BLOCK", "GROUP", "SCALE_BYTES", "BlockQuantizer"]


class BlockQuantizer:
    """Packs float32 rows, whose length is a multiple of `multiple`, into uint8 rows of `wire_bytes`."""

    multiple = GROUP

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def wire_bytes(self, length: int) -> int:
        return packed_bytes(length, self.bits)

    def encode_(self, values_RN: Tensor, wire_RB: Tensor) -> None:
        """Write values_RN into wire_RB, and leave the quantization error in values_RN."""
        quantize_blocks(values_RN, wire_RB, self.bits)

    def decode(self, wire_RB: Tensor, out_RN: Tensor) -> Tensor:
        """Write the values of wire_RB to out_RN.

        Returns: a number that is finite when every value is.
        """
        return dequantize_blocks(wire_RB, out_RN, self.bits)

    def add_rows_(self, wire_RB: Tensor, out_N: Tensor) -> None:
        """Add the values of all rows of wire_RB to out_N."""
        add_quantized_rows(wire_RB, out_N, self.bits)
