"""Numba kernels that quantize blocks, and read or add them, on a CPU: one pass over memory, without the GIL.

A group of 256 values is worked on at a time, in a scratch array that stays in the first cache. It holds 32-bit words:
256 values as float bits, 256 codes, and the keys, scales and inverses of 8 blocks. One array for all of it tells LLVM
what overlaps, so that every loop over lanes becomes vector instructions. No fast-math: the results are those of
`reference.py` to the bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_aigc_kernels.numba_cache import compiled, helper
from lightning_aigc_kernels.quantize_blocks.layout import BLOCK, BLOCKS, GROUP, HUGE, TINY, largest_scale

F32, I32, U8, U16, U32 = np.float32, np.int32, np.uint8, np.uint16, np.uint32
TO_INTEGER = F32(1.5 * 2**23)
"""Added and subtracted, it rounds what is below 2^22 to an integer, halves to even."""
ZERO, ONE = F32(0), F32(1)
TINY_SCALE, HUGE_BITS = int(F32(TINY).view(U32)) >> 16, int(F32(HUGE).view(U32))
INFINITE_SCALE, NAN = 0x7F80, F32(np.nan)
CODES, KEYS, SCALES, INVERSES = GROUP, 2 * GROUP, 2 * GROUP + BLOCKS, 2 * GROUP + 2 * BLOCKS
"""Where in the scratch array what begins."""
SCRATCH = 2 * GROUP + 3 * BLOCKS


@helper
def to_float(bits):
    """The float32 of these bits."""
    return U32(bits).view(F32)


@helper
def to_bits(value):
    """The bits of a float32."""
    return F32(value).view(U32)


@helper
def choose_scales(scratch, bits):
    """Choose the scales of a group's blocks, as float bits, and their inverses."""
    for block in range(BLOCKS):
        key = U32(0)
        for i in range(block * BLOCK, block * BLOCK + BLOCK):
            # Rotated by a bit, the greatest number has the largest magnitude, and of two the one that is negative.
            key = max(key, U32((scratch[i] << U32(1)) | (scratch[i] >> U32(31))))
        scratch[KEYS + block] = key
    for block in range(BLOCKS):
        key = np.int64(scratch[KEYS + block])
        magnitude = key >> 1
        exact = magnitude - ((bits - 1) << 23)  # divided by 2^(bits - 1)
        rounded = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16  # to bfloat16, halves to even
        is_tiny, is_huge = rounded < TINY_SCALE, magnitude >= HUGE_BITS
        scale = rounded | ((1 - (key & 1)) << 15)
        scale = INFINITE_SCALE if is_huge else (0 if is_tiny else scale)
        scratch[SCALES + block] = U32(scale << 16)
        inverse = ONE / to_float(U32(scale << 16))
        inverse = NAN if is_huge else (ZERO if is_tiny else inverse)
        scratch[INVERSES + block] = to_bits(inverse)


@helper
def quantize_group(scratch, bits):
    """Quantize the values in scratch: to codes, with the error in their place."""
    choose_scales(scratch, bits)
    half = F32(1 << (bits - 1))
    top = half - ONE
    for block in range(BLOCKS):
        scale, inverse = to_float(scratch[SCALES + block]), to_float(scratch[INVERSES + block])
        for i in range(block * BLOCK, block * BLOCK + BLOCK):
            value = to_float(scratch[i])
            integer = (value * inverse + TO_INTEGER) - TO_INTEGER
            integer = integer if integer < top else top  # NaN becomes the top
            scratch[i] = to_bits((value - integer * scale) + ZERO)  # + 0 makes -0 to 0, as torch does
            scratch[CODES + i] = U32(I32(integer + half))


@helper
def write_codes(scratch, codes, at, bits):
    """Write a group's codes to its bytes, from codes[at] on."""
    if bits == 8:
        for i in range(GROUP):
            codes[at + i] = U8(scratch[CODES + i])
        return
    for lane in range(BLOCK):
        word = U32(0)
        for block in range(BLOCKS):
            word |= scratch[CODES + block * BLOCK + lane] << U32(bits * block)
        scratch[CODES + lane] = word
    for byte in range(bits):
        for lane in range(BLOCK):
            codes[at + byte * BLOCK + lane] = U8(scratch[CODES + lane] >> U32(8 * byte))


@helper
def read_group(scratch, scales, at_scale, groups, codes, at, bits):
    """Read a group's values from scales[at_scale], one for each `groups`, and from codes[at] on."""
    half, mask = F32(1 << (bits - 1)), U32((1 << bits) - 1)
    for block in range(BLOCKS):
        scratch[SCALES + block] = U32(scales[at_scale + block * groups]) << U32(16)
    if bits == 8:
        for block in range(BLOCKS):
            scale = to_float(scratch[SCALES + block])
            for i in range(block * BLOCK, block * BLOCK + BLOCK):
                scratch[i] = to_bits((F32(I32(codes[at + i])) - half) * scale)
        return
    for lane in range(BLOCK):
        word = U32(codes[at + lane])
        for byte in range(1, bits):
            word |= U32(codes[at + byte * BLOCK + lane]) << U32(8 * byte)
        for block in range(BLOCKS):
            code = (word >> U32(bits * block)) & mask
            scale = to_float(scratch[SCALES + block])
            scratch[block * BLOCK + lane] = to_bits((F32(I32(code)) - half) * scale)


ROWS = "void(f4[::1], u1[::1], u2[::1], i8, i8)"


@compiled(ROWS)
def quantize_rows(values, codes, scales, rows, bits):
    """Quantize rows in place; `codes` and `scales` are the packed rows as bytes and as pairs of bytes."""
    scratch = np.empty(SCRATCH, U32)
    groups = values.size // (rows * GROUP)
    nbytes = groups * (2 * BLOCKS + BLOCK * bits)
    for row in range(rows):
        for group in range(groups):
            part = values[(row * groups + group) * GROUP : (row * groups + group + 1) * GROUP]
            for i in range(GROUP):
                scratch[i] = to_bits(part[i])
            quantize_group(scratch, bits)
            for i in range(GROUP):
                part[i] = to_float(scratch[i])
            for block in range(BLOCKS):
                scales[row * nbytes // 2 + block * groups + group] = U16(scratch[SCALES + block] >> U32(16))
            write_codes(scratch, codes, row * nbytes + 2 * BLOCKS * groups + group * BLOCK * bits, bits)


@compiled(ROWS)
def dequantize_rows(values, codes, scales, rows, bits):
    """Write the values of packed rows."""
    scratch = np.empty(SCRATCH, U32)
    groups = values.size // (rows * GROUP)
    nbytes = groups * (2 * BLOCKS + BLOCK * bits)
    for row in range(rows):
        for group in range(groups):
            at = row * nbytes + 2 * BLOCKS * groups + group * BLOCK * bits
            read_group(scratch, scales, row * nbytes // 2 + group, groups, codes, at, bits)
            part = values[(row * groups + group) * GROUP : (row * groups + group + 1) * GROUP]
            for i in range(GROUP):
                part[i] = to_float(scratch[i])


@compiled(ROWS)
def add_rows(values, codes, scales, rows, bits):
    """Add all packed rows to one row of values."""
    scratch = np.empty(SCRATCH, U32)
    groups = values.size // GROUP
    nbytes = groups * (2 * BLOCKS + BLOCK * bits)
    for group in range(groups):
        part = values[group * GROUP : (group + 1) * GROUP]
        for row in range(rows):
            at = row * nbytes + 2 * BLOCKS * groups + group * BLOCK * bits
            read_group(scratch, scales, row * nbytes // 2 + group, groups, codes, at, bits)
            for i in range(GROUP):
                part[i] += to_float(scratch[i])


@compiled("void(f4[::1], f4, f4[::1], f4[::1], u1[::1], u2[::1], i8, i8, u1[::1], u2[::1], i8, i8, i8)")
def quantize_part(gradient, share, residual, error, received, received_scales, rows, mine, codes, scales, groups, first, bits):
    """Quantize residual + share * gradient + the received rows but `mine`; what is left goes to `error`.

    They are a part of a row of `groups` groups, from its group `first` on. `gradient` may be shorter by less than a group.
    """
    scratch, total = np.empty(SCRATCH, U32), np.empty(GROUP, F32)
    nbytes = groups * (2 * BLOCKS + BLOCK * bits)
    for group in range(residual.size // GROUP):
        start = group * GROUP
        inside = min(GROUP, gradient.size - start)
        for i in range(GROUP):
            total[i] = residual[start + i]
        for i in range(inside):
            total[i] += gradient[start + i] * share
        at_scale, at = first + group, 2 * BLOCKS * groups + (first + group) * BLOCK * bits
        for row in range(rows):
            if row != mine:
                place = row * nbytes
                read_group(scratch, received_scales, place // 2 + at_scale, groups, received, place + at, bits)
                for i in range(GROUP):
                    total[i] += to_float(scratch[i])
        for i in range(GROUP):
            scratch[i] = to_bits(total[i])
        quantize_group(scratch, bits)
        for i in range(GROUP):
            error[start + i] = to_float(scratch[i])
        for block in range(BLOCKS):
            scales[block * groups + at_scale] = U16(scratch[SCALES + block] >> U32(16))
        write_codes(scratch, codes, at, bits)


@compiled("void(u1[::1], u2[::1], i8, i8, f4, f4[::1], i8)")
def dequantize_part(codes, scales, groups, first, factor, out, bits):
    """Write a part of a row, from its group `first` on, times a factor."""
    scratch = np.empty(SCRATCH, U32)
    for group in range((out.size + GROUP - 1) // GROUP):
        at = 2 * BLOCKS * groups + (first + group) * BLOCK * bits
        read_group(scratch, scales, first + group, groups, codes, at, bits)
        start = group * GROUP
        for i in range(min(GROUP, out.size - start)):
            out[start + i] = to_float(scratch[i]) * factor


def quantize_blocks(values_RN: Tensor, packed_RB: Tensor, bits: int) -> None:
    """As the reference."""
    if values_RN.numel():
        quantize_rows(values_RN.view(-1).numpy(), *_memory(packed_RB), len(values_RN), bits)


def dequantize_blocks(packed_RB: Tensor, out_RN: Tensor, bits: int) -> Tensor:
    """As the reference."""
    if out_RN.numel():
        dequantize_rows(out_RN.view(-1).numpy(), *_memory(packed_RB), len(out_RN), bits)
    return largest_scale(packed_RB, out_RN.shape[1])


def add_quantized_rows(packed_RB: Tensor, out_N: Tensor, bits: int) -> None:
    """As the reference."""
    if out_N.numel():
        add_rows(out_N.numpy(), *_memory(packed_RB), len(packed_RB), bits)


def _memory(packed_RB: Tensor):
    """Return the packed rows as a NumPy array of bytes, and as one of pairs of bytes."""
    codes = packed_RB.view(-1).numpy()
    return codes, codes.view(U16)
