"""Triton functions on one tile of channels by pixels, shared by the GroupNorm kernels."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slope_and_offset(weight_ptr, bias_ptr, scale_row, shift_row, channel, inside, MODULATED: tl.constexpr):
    """slope = weight * (1 + scale) and offset = bias * (1 + scale) + shift per channel: z = slope * xhat + offset."""
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if MODULATED:
        amplify = 1.0 + tl.load(scale_row + channel, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(shift_row + channel, mask=inside, other=0.0).to(tl.float32)
        weight = weight * amplify
        bias = bias * amplify + shift
    return weight, bias


@triton.jit
def normalised_and_dz(x_ptr, dy_ptr, offsets, inside, mean, rstd, slope, offset, SILU: tl.constexpr):
    """xhat, the normalised x of a tile, and dz, the gradient of the activation's input."""
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dz = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    xhat = (x - mean) * rstd
    if SILU:
        z = xhat * slope[:, None] + offset[:, None]
        gate = tl.sigmoid(z)
        dz = dz * gate * (1.0 + z * (1.0 - gate))
    return xhat, dz
