"""Triton functions on one tile of tokens by channels, shared by the kernels of this folder."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mean_and_rstd(
    x_ptr, row, in_sample, channels, eps, LAYER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Mean, which is 0 without LAYER, and reciprocal deviation or root mean square of each token, reading x once.

    `row` is where each token starts. Two passes per tile, then merged.
    Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    mean = tl.zeros([BLOCK_T], tl.float32)
    m2 = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, channels, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        inside = in_sample[:, None] & (channel < channels)[None, :]
        values = tl.load(x_ptr + row[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        if LAYER:
            count = tl.minimum(channels - start, BLOCK_C).to(tl.float32)
            tile_mean = tl.sum(values, 1) / count
            centred = tl.where(inside, values - tile_mean[:, None], 0.0)
            delta = tile_mean - mean
            share = count / (start + count)
            mean += delta * share
            m2 += tl.sum(centred * centred, 1) + delta * delta * (share * start)
        else:
            m2 += tl.sum(values * values, 1)
    return mean, 1.0 / tl.sqrt(m2 / channels + eps)


@triton.jit
def slope_of(
    scale_row,
    weight_ptr,
    channel,
    inside,
    ONE_PLUS: tl.constexpr,
    SCALED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """weight * (1 + scale) per channel, or weight * scale without ONE_PLUS; an absent factor is left out."""
    if SCALED:
        slope = tl.load(scale_row + channel, mask=inside, other=0.0).to(tl.float32)
        if ONE_PLUS:
            slope = 1.0 + slope
        if WEIGHTED:
            slope = slope * tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    elif WEIGHTED:
        slope = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        slope = tl.full([BLOCK_C], 1.0, tl.float32)
    return slope


@triton.jit
def offset_of(
    scale_row,
    shift_row,
    bias_ptr,
    channel,
    inside,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """bias * (1 + scale) + shift per channel; an absent part is left out."""
    offset = tl.zeros([BLOCK_C], tl.float32)
    if BIASED:
        offset = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            offset = offset * (1.0 + tl.load(scale_row + channel, mask=inside, other=0.0).to(tl.float32))
    if SHIFTED:
        offset = offset + tl.load(shift_row + channel, mask=inside, other=0.0).to(tl.float32)
    return offset
