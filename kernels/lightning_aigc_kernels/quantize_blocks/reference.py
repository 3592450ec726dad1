"""Quantize blocks to few-bit integers, and read or add them, in plain torch.

A block's entry of largest magnitude becomes the lowest integer, so that no level is unused on its side: with
h = 2^(bits - 1), scale = -extreme / h rounded to bfloat16, and the integers run from -h to h - 1. An integer times its
scale is exact in float32.

Dimensions: R rows of N values, packed to B bytes; G groups of K blocks of L lanes, see `layout.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_aigc_kernels.quantize_blocks.layout import BLOCK, BLOCKS, GROUP, HUGE, SCALE_BYTES, TINY, scale_magnitude

CPU_CHUNK = 262_144
"""Values that a CPU takes at a time: complete groups, few enough to stay in its cache between passes."""


def quantize_blocks(values_RN: Tensor, packed_RB: Tensor, bits: int) -> None:
    """Write values_RN into packed_RB, and leave the quantization error in values_RN."""
    half = 2 ** (bits - 1)
    for rows, groups in _chunks(values_RN.shape, values_RN.device):
        x_RGKL = _grouped(values_RN[rows], groups)
        highest, lowest = x_RGKL.amax(3), x_RGKL.amin(3)
        extreme = torch.where(highest > -lowest, highest, lowest)  # NaN compares as false, and both are NaN then
        is_huge = (extreme.abs() < HUGE).logical_not_()
        scale = extreme.mul_(-1 / half).bfloat16()
        is_tiny = scale.abs() < TINY
        scale.masked_fill_(is_tiny, 0).masked_fill_(is_huge, math.inf)
        scales_RKG, codes_RGPL = _parts(packed_RB[rows], groups, bits)
        scales_RKG.copy_(scale.transpose(1, 2))
        scale = scale.float().unsqueeze(3)
        inverse = scale.reciprocal().masked_fill_(is_tiny.unsqueeze(3), 0)
        integers = torch.mul(x_RGKL, inverse).round_().clamp_(-half, half - 1)
        integers.masked_fill_(is_huge.unsqueeze(3), half - 1)
        x_RGKL.addcmul_(integers, scale, value=-1)
        codes_RGPL.copy_(_pack(integers.add_(half), bits))


def dequantize_blocks(packed_RB: Tensor, out_RN: Tensor, bits: int) -> Tensor:
    """Write the values of packed_RB to out_RN.

    Returns: the largest magnitude of a scale, which is finite when every value is.
    """
    for rows, groups in _chunks(out_RN.shape, out_RN.device):
        integers, scale = _unpack(packed_RB[rows], groups, bits)
        torch.mul(integers, scale, out=_grouped(out_RN[rows], groups))
    return scale_magnitude(packed_RB, out_RN.shape[1])


def add_quantized_rows(packed_RB: Tensor, out_N: Tensor, bits: int) -> None:
    """Add the values of all rows of packed_RB to out_N, row after row."""
    for rows, groups in _chunks((len(packed_RB), len(out_N)), out_N.device):
        integers, scale = _unpack(packed_RB[rows], groups, bits)
        out_GKL = _grouped(out_N.view(1, -1), groups)[0]
        for row in range(len(integers)):
            out_GKL.addcmul_(integers[row], scale[row])


def _chunks(shape: Sequence[int], device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield what to take at a time, as rows and groups: some rows, or a part of a row; on an accelerator everything."""
    rows, length = shape
    limit = max(GROUP, CPU_CHUNK if device.type == "cpu" else rows * length)
    together = max(1, limit // max(1, length))
    for row in range(0, rows, together):
        for start in range(0, length, limit):
            yield slice(row, row + together), slice(start // GROUP, min(start + limit, length) // GROUP)


def _grouped(values_RN: Tensor, groups: slice) -> Tensor:
    """Return a view of these groups of each row as [R, G, K, L]."""
    return values_RN[:, groups.start * GROUP : groups.stop * GROUP].view(len(values_RN), -1, BLOCKS, BLOCK)


def _parts(packed_RB: Tensor, groups: slice, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scales [R, K, G] and the codes [R, G, P, L] of these groups of each row, as views."""
    rows, count = len(packed_RB), packed_RB.shape[1] // (BLOCKS * SCALE_BYTES + BLOCK * bits)
    split = count * BLOCKS * SCALE_BYTES
    scales = packed_RB[:, :split].view(torch.bfloat16).view(rows, BLOCKS, count)
    codes = packed_RB[:, split:].view(rows, count, bits, BLOCK)
    return scales[:, :, groups], codes[:, groups]


def _pack(codes_RGKL: Tensor, bits: int) -> Tensor:
    """Return the bytes [R, G, P, L] of codes that lie in [0, 2^bits)."""
    if bits == 8:
        return codes_RGKL
    codes = codes_RGKL.to(torch.int32)
    lanes = codes.bitwise_left_shift_(_shifts(BLOCKS, bits, codes.device)).sum(2, keepdim=True, dtype=torch.int32)
    return lanes.bitwise_right_shift(_shifts(bits, 8, codes.device)).bitwise_and_(255)


def _unpack(packed_RB: Tensor, groups: slice, bits: int) -> tuple[Tensor, Tensor]:
    """Return the integers [R, G, K, L] of these groups as float32, and their scales [R, G, K, 1]."""
    scales, codes = _parts(packed_RB, groups, bits)
    if bits < 8:
        wide = codes.to(torch.int32)
        lanes = wide.bitwise_left_shift_(_shifts(bits, 8, codes.device)).sum(2, keepdim=True, dtype=torch.int32)
        codes = lanes.bitwise_right_shift(_shifts(BLOCKS, bits, codes.device)).bitwise_and_(2**bits - 1)
    integers = codes.to(torch.float32).sub_(2 ** (bits - 1))
    return integers, scales.transpose(1, 2).to(torch.float32).unsqueeze(3)


def _shifts(count: int, step: int, device: torch.device) -> Tensor:
    """Return 0, step, 2 step ... [count, 1]."""
    return torch.arange(0, count * step, step, dtype=torch.int32, device=device).view(-1, 1)
