"""Numba kernels that quantize blocks, and read or add them, on a CPU: one pass over memory, without the GIL.

Each works on a group of 256 values after the other, which stay in the first cache from step to step. No fast-math: the
results are bit-identical to those of `reference.py`.

LLVM makes vector instructions of a loop over lanes if it has enough to do; a short one it unrolls to scalar
instructions, unless its length is an argument: hence `lanes`, which is always 32.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
from torch import Tensor

from lightning_aigc_kernels.numba_cache import closure_helper, compiled, helper
from lightning_aigc_kernels.quantize_blocks.layout import BITS, BLOCK, BLOCKS, GROUP, HUGE, TINY, scale_magnitude

F32, I32, U8, U16, U32 = np.float32, np.int32, np.uint8, np.uint16, np.uint32
TO_INTEGER = F32(1.5 * 2**23)
"""Added and subtracted, it rounds what is below 2^22 to an integer, halves to even."""
ZERO, ONE, NAN, TINY_SCALE, HUGE_VALUE = F32(0), F32(1), F32(np.nan), F32(TINY), F32(HUGE)
INFINITE_BITS = U32(0x7F800000)


@helper
def to_float(bits):
    """The float32 of these bits."""
    return U32(bits).view(F32)


@helper
def to_bits(value):
    """The bits of a float32."""
    return F32(value).view(U32)


def quantizer_of(bits):
    """Return the function that quantizes a group in place, and writes its scales, one for each `groups`, and codes."""
    half, per_half = F32(1 << (bits - 1)), F32(1 / (1 << (bits - 1)))
    top = half - ONE

    @closure_helper(f"quantize_group_{bits}")
    def quantize_group(values, scales, groups, codes, scratch, lanes):
        for block in range(BLOCKS):
            key = U32(0)  # of the extreme: its bits rotated, so that of two the negative one is larger
            for lane in range(lanes):
                bits_of = to_bits(values[block * BLOCK + lane])
                rotated = U32((bits_of << U32(1)) | (bits_of >> U32(31)))
                key = rotated if rotated > key else key
            magnitude = to_float(key >> U32(1))
            exact = to_bits(magnitude * per_half)
            rounded = U32(exact + U32(0x7FFF) + ((exact >> U32(16)) & U32(1))) & U32(0xFFFF0000)  # halves to even
            is_tiny, is_finite = to_float(rounded) < TINY_SCALE, magnitude < HUGE_VALUE
            scale_bits = U32(rounded | ((key ^ U32(1)) << U32(31)))
            scale_bits = (U32(0) if is_tiny else scale_bits) if is_finite else INFINITE_BITS
            scales[block * groups] = U16(scale_bits >> U32(16))
            scale = to_float(scale_bits)
            inverse = (ZERO if is_tiny else ONE / scale) if is_finite else NAN
            for lane in range(lanes):
                value = values[block * BLOCK + lane]
                integer = (value * inverse + TO_INTEGER) - TO_INTEGER
                integer = integer if integer < top else top  # NaN becomes the top
                values[block * BLOCK + lane] = (value - integer * scale) + ZERO  # + 0 makes -0 to 0, as torch does
                scratch[block * BLOCK + lane] = I32(integer + half)
        if bits == 8:
            for i in range(GROUP):
                codes[i] = U8(scratch[i])
            return
        for lane in range(BLOCK):
            word = U32(0)
            for block in range(BLOCKS):
                word = U32(word | (U32(scratch[block * BLOCK + lane]) << U32(bits * block)))
            for byte in range(bits):
                codes[byte * BLOCK + lane] = U8(word >> U32(8 * byte))

    return quantize_group


def reader_of(bits, adds):
    """Return the function that reads a group from its scales, one for each `groups`, and codes.

    It writes the values times a factor, or adds them. Returns: the bits of the scale of the largest magnitude.
    """
    half, mask = F32(1 << (bits - 1)), U32((1 << bits) - 1)
    kind = f"{bits}_{'adds' if adds else 'writes'}"

    @closure_helper(f"scale_of_{kind}")
    def scale_of(scales, place):
        return to_float(U32(U32(scales[place]) << U32(16)))

    @closure_helper(f"read_group_{kind}")
    def read_group(values, scales, groups, codes, factor):
        of_blocks = (
            scale_of(scales, 0),
            scale_of(scales, groups),
            scale_of(scales, 2 * groups),
            scale_of(scales, 3 * groups),
            scale_of(scales, 4 * groups),
            scale_of(scales, 5 * groups),
            scale_of(scales, 6 * groups),
            scale_of(scales, 7 * groups),
        )
        for lane in range(BLOCK):
            word = U32(0)
            if bits < 8:
                for byte in range(bits):
                    word = U32(word | (U32(codes[byte * BLOCK + lane]) << U32(8 * byte)))
            for block in range(BLOCKS):
                code = U32(codes[block * BLOCK + lane]) if bits == 8 else U32((word >> U32(bits * block)) & mask)
                value = (F32(I32(code)) - half) * of_blocks[block]
                if adds:
                    values[block * BLOCK + lane] += value
                else:
                    values[block * BLOCK + lane] = value * factor

    return read_group


quantize_3, quantize_4, quantize_8 = (quantizer_of(bits) for bits in BITS)
read_3, read_4, read_8 = (reader_of(bits, False) for bits in BITS)
add_3, add_4, add_8 = (reader_of(bits, True) for bits in BITS)


@helper
def quantize_group(values, scales, groups, codes, bits, scratch, lanes):
    """Quantize a group in place."""
    if bits == 3:
        quantize_3(values, scales, groups, codes, scratch, lanes)
    elif bits == 4:
        quantize_4(values, scales, groups, codes, scratch, lanes)
    else:
        quantize_8(values, scales, groups, codes, scratch, lanes)


@helper
def read_group(values, scales, groups, codes, bits, factor):
    """Write a group's values times a factor."""
    if bits == 3:
        read_3(values, scales, groups, codes, factor)
    elif bits == 4:
        read_4(values, scales, groups, codes, factor)
    else:
        read_8(values, scales, groups, codes, factor)


@helper
def add_group(values, scales, groups, codes, bits):
    """Add a group's values."""
    if bits == 3:
        add_3(values, scales, groups, codes, ONE)
    elif bits == 4:
        add_4(values, scales, groups, codes, ONE)
    else:
        add_8(values, scales, groups, codes, ONE)


@compiled("void(f4[::1], u1[::1], u2[::1], i8, i8, i8)")
def quantize_rows(values, codes, scales, rows, bits, lanes):
    """Quantize rows in place; `codes` and `scales` are the packed rows as bytes and as pairs of bytes."""
    scratch = np.empty(GROUP, I32)
    groups = values.size // (rows * GROUP)
    nbytes = groups * (2 * BLOCKS + BLOCK * bits)
    for row in range(rows):
        for group in range(groups):
            part = values[(row * groups + group) * GROUP :]
            at = row * nbytes + 2 * BLOCKS * groups + group * BLOCK * bits
            quantize_group(part, scales[row * nbytes // 2 + group :], groups, codes[at:], bits, scratch, lanes)


@compiled("void(f4[::1], u1[::1], u2[::1], i8, i8)")
def dequantize_rows(values, codes, scales, rows, bits):
    """Write the values of packed rows."""
    groups = values.size // (rows * GROUP)
    nbytes = groups * (2 * BLOCKS + BLOCK * bits)
    for row in range(rows):
        for group in range(groups):
            at = row * nbytes + 2 * BLOCKS * groups + group * BLOCK * bits
            part = values[(row * groups + group) * GROUP :]
            read_group(part, scales[row * nbytes // 2 + group :], groups, codes[at:], bits, ONE)


@compiled("void(f4[::1], u1[::1], u2[::1], i8, i8)")
def add_rows(values, codes, scales, rows, bits):
    """Add all packed rows to one row of values."""
    groups = values.size // GROUP
    nbytes = groups * (2 * BLOCKS + BLOCK * bits)
    for group in range(groups):
        part = values[group * GROUP :]
        for row in range(rows):
            at = row * nbytes + 2 * BLOCKS * groups + group * BLOCK * bits
            add_group(part, scales[row * nbytes // 2 + group :], groups, codes[at:], bits)


PARTS = "void(f4[::1], f4, f4[::1], f4[::1], u1[::1], u2[::1], i8, i8, u1[::1], u2[::1], i8, i8, i8, i8)"


@compiled(PARTS)
def quantize_part(
    gradient, share, residual, error, received, received_scales, rows, mine, codes, scales, groups, first, bits, lanes
):
    """Quantize residual + share * gradient + all received rows but `mine` into a part of a row; the rest is the error.

    The row has as many groups, and the part begins with its group `first`. `gradient` may lack some of the last group.
    """
    scratch = np.empty(GROUP, I32)
    nbytes = groups * (2 * BLOCKS + BLOCK * bits)
    for group in range(error.size // GROUP):
        start = group * GROUP
        total, before, new = error[start : start + GROUP], residual[start : start + GROUP], gradient[start:]
        if new.size >= GROUP:
            for i in range(GROUP):
                total[i] = before[i] + new[i] * share
        else:
            for i in range(GROUP):
                total[i] = before[i]
            for i in range(new.size):
                total[i] += new[i] * share
        at_scale, at = first + group, 2 * BLOCKS * groups + (first + group) * BLOCK * bits
        for row in range(rows):
            if row != mine:
                scales_of_row = received_scales[row * nbytes // 2 + at_scale :]
                add_group(total, scales_of_row, groups, received[row * nbytes + at :], bits)
        quantize_group(total, scales[at_scale:], groups, codes[at:], bits, scratch, lanes)


@compiled("void(u1[::1], u2[::1], i8, i8, i8, f4, f4[::1])")
def dequantize_part(codes, scales, groups, first, bits, factor, out):
    """Write a part of a row, from its group `first` on, times a factor; `out` may end within a group."""
    whole = out.size // GROUP
    rest = out.size - whole * GROUP
    last = np.empty(GROUP, F32)
    for group in range(whole + (rest > 0)):
        at = 2 * BLOCKS * groups + (first + group) * BLOCK * bits
        into = out[group * GROUP :] if group < whole else last
        read_group(into, scales[first + group :], groups, codes[at:], bits, factor)
    for i in range(rest):
        out[whole * GROUP + i] = last[i]


def quantize_blocks(values_RN: Tensor, packed_RB: Tensor, bits: int) -> None:
    """Compute the reference's result."""
    if values_RN.numel():
        quantize_rows(values_RN.view(-1).numpy(), *_memory(packed_RB), len(values_RN), bits, BLOCK)


def dequantize_blocks(packed_RB: Tensor, out_RN: Tensor, bits: int) -> Tensor:
    """Compute the reference's result."""
    if out_RN.numel():
        dequantize_rows(out_RN.view(-1).numpy(), *_memory(packed_RB), len(out_RN), bits)
    return scale_magnitude(packed_RB, out_RN.shape[1])


def add_quantized_rows(packed_RB: Tensor, out_N: Tensor, bits: int) -> None:
    """Compute the reference's result."""
    if out_N.numel():
        add_rows(out_N.numpy(), *_memory(packed_RB), len(packed_RB), bits)


def _memory(packed_RB: Tensor):
    """Return the packed rows as a NumPy array of bytes, and as one of pairs of bytes."""
    codes = packed_RB.view(-1).numpy()
    return codes, codes.view(U16)
