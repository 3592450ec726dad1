"""The k-th largest magnitude of a run of memory, exactly, by bisection over the bits of a float: for Triton kernels.

The bits of a non-negative float, read as an integer, are in the order of its value. So 15 counts (31 for float32) pin
the k-th largest magnitude down to the bit, whatever the distribution: no sort, no histogram, no gather, which an Ascend
vector core would run as a scalar loop. Magnitudes are compared as float32, because that core compares integers slowly.
NaN counts as infinite: it is kept first and stays NaN.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_of_bits(bits, like):
    """The float32 value of an integer read as the bits of a float of `like`'s dtype."""
    if like.dtype.element_ty == tl.float32:
        value = bits.to(tl.float32, bitcast=True)
    elif like.dtype.element_ty == tl.bfloat16:
        value = (bits << 16).to(tl.float32, bitcast=True)  # bfloat16 is the upper half of float32
    else:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def count_at_least(run_ptr, length, threshold, BLOCK: tl.constexpr):
    """How many of the `length` values at run_ptr have at least this magnitude (or are NaN); threshold is positive."""
    count = 0
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        values = tl.load(run_ptr + offsets, mask=offsets < length, other=0.0).to(tl.float32)
        # Float32 counts up to 2**24 exactly, and a tile is smaller; the padding is 0, under any positive threshold.
        count += tl.sum(tl.where(tl.abs(values) < threshold, 0.0, 1.0), 0).to(tl.int32)
    return count


@triton.jit
def kth_largest_magnitude(run_ptr, length, k, BLOCK: tl.constexpr):
    """The k-th largest magnitude (float32) among `length` values at run_ptr, NaN counting as infinite."""
    if run_ptr.dtype.element_ty == tl.float32:
        steps = 31
        infinity = 0x7F800000
    elif run_ptr.dtype.element_ty == tl.bfloat16:
        steps = 15
        infinity = 0x7F80
    else:
        steps = 15
        infinity = 0x7C00
    # At least k values reach the magnitude `low`; fewer than k reach `high`. Bits above infinity would be NaN.
    low = tl.program_id(0) * 0
    high = low + infinity + 1
    for _ in range(steps):
        middle = low + (high - low) // 2
        enough = count_at_least(run_ptr, length, magnitude_of_bits(middle, run_ptr), BLOCK) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return magnitude_of_bits(low, run_ptr)


@triton.jit
def copy_at_least(source_ptr, target_ptr, length, threshold, BLOCK: tl.constexpr):
    """Copy what has at least this magnitude or is NaN, and write 0 in the place of the rest; works in place."""
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < length
        values = tl.load(source_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        kept = tl.where(tl.abs(values) < threshold, 0.0, values)
        tl.store(target_ptr + offsets, kept.to(target_ptr.dtype.element_ty), mask=inside)
