"""Triton functions for the exact k-th largest magnitude of a run of memory, by bisection over the bits of a float.

The bits of a non-negative float, read as an integer, sort like its value. So 15 counts (31 for float32) determine the
k-th largest magnitude exactly for any distribution, without a sort, histogram or gather, which an Ascend vector core
would run as a scalar loop. Magnitudes are compared as float32, because that core compares integers slowly. NaN counts
as infinite: it is kept first and stays NaN.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_of_bits(bits, like):
    """The float32 value of an integer whose bits are a float of `like`'s dtype."""
    if like.dtype.element_ty == tl.float32:
        value = bits.to(tl.float32, bitcast=True)
    elif like.dtype.element_ty == tl.bfloat16:
        value = (bits << 16).to(tl.float32, bitcast=True)  # bfloat16 is the upper half of float32
    else:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def count_at_least(run_ptr, length, threshold, BLOCK: tl.constexpr):
    """Count the values at run_ptr with at least this magnitude, NaN included; threshold is positive."""
    count = 0
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        values = tl.load(run_ptr + offsets, mask=offsets < length, other=0.0).to(tl.float32)
        # Float32 counts exactly up to 2**24, more than a tile has; the padding is 0, below any positive threshold.
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
    # Invariant: at least k values reach `low`, fewer than k reach `high`. Bits above infinity would be NaN.
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
    """Copy values with at least this magnitude, NaN included, and write 0 for the rest; works in place."""
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < length
        values = tl.load(source_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        kept = tl.where(tl.abs(values) < threshold, 0.0, values)
        tl.store(target_ptr + offsets, kept.to(target_ptr.dtype.element_ty), mask=inside)
