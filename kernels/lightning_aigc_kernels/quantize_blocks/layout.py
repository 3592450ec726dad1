"""Layout of quantized rows: few-bit integers in blocks that share a scale, and the bytes that they are packed to.

A row of N values is cut into groups of 8 blocks of 32 values. Packed it is all scales, then all codes:

    scales [8, N / 256] bfloat16: the scale of block k of group g is at [k, g]
    codes [N / 256, bits, 32] uint8: byte p of lane j of group g is at [g, p, j]

A lane's codes, one of each of its group's blocks, are one integer of 8 * bits bits, block k's at bit k * bits; its
bytes follow each other from the lowest. So neighbours are packed alike, side by side, and nothing is gathered.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BITS = (3, 4, 8)
BLOCK = 32
"""Values that share a scale: smaller blocks cost bytes, larger ones lose their small values."""
BLOCKS = 8
"""Blocks of a group, whose codes share bytes."""
GROUP = BLOCK * BLOCKS
"""A row's length divides by it."""
SCALE_BYTES = 2
"""A scale is a bfloat16, which has float32's range."""
TINY = 2.0**-100
"""A block whose scale is below this is all zeros: its inverse could overflow."""
HUGE = 2.0**127
"""A block that has a magnitude of at least this, or NaN, counts as not finite: its scale is infinite, and so is all
that is read from it."""


def packed_bytes(length: int, bits: int) -> int:
    """Return the bytes of a row of this many values."""
    return length // BLOCK * SCALE_BYTES + length * bits // 8


def check(values: Tensor, packed_RB: Tensor, bits: int) -> None:
    """Check what an op is given: values [R, N], or [N] that all packed rows have.

    Raises: ValueError for another number of bits or dtype, strides, a length that does not divide, or bytes that do not
        fit it.
    """
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}; got {bits}")
    if values.dtype != torch.float32 or packed_RB.dtype != torch.uint8:
        raise ValueError(f"values must be float32 and packed uint8, got {values.dtype} and {packed_RB.dtype}")
    if not (values.is_contiguous() and packed_RB.is_contiguous()):
        raise ValueError(f"both must be contiguous, got strides {values.stride()} and {packed_RB.stride()}")
    if values.dim() not in (1, 2) or values.shape[-1] % GROUP:
        got = tuple(values.shape)
        raise ValueError(f"values must be rows whose length divides by {GROUP}, got {got}; pad them with zeros")
    rows = len(values) if values.dim() == 2 else len(packed_RB)
    wanted = (rows, packed_bytes(values.shape[-1], bits))
    if packed_RB.shape != wanted:
        raise ValueError(f"values {tuple(values.shape)} pack to {wanted} at {bits} bits, got {tuple(packed_RB.shape)}")


def scale_magnitude(packed_RB: Tensor, length: int) -> Tensor:
    """Return the largest magnitude of a scale, float32: finite when all values are."""
    scales = packed_RB[:, : length // BLOCK * SCALE_BYTES].view(torch.bfloat16)
    largest: Tensor = torch.linalg.vector_norm(scales, math.inf, dtype=torch.float32)
    return largest
