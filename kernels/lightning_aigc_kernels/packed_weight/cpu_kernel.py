"""Numba kernels that unpack a weight on a CPU: one pass over memory, without the GIL, the reference's bits.

A block's 64 numbers are products of its bytes and its scale in float32, rounded once. NF4 has only 16 different ones in
a block, which are computed first and looked up then.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_aigc_kernels.numba_cache import compiled, helper
from lightning_aigc_kernels.packed_weight.reference import BLOCK, CODES, Format

F32, U16, U32 = np.float32, np.uint16, np.uint32
CODE = np.array(CODES, dtype=F32)


@helper
def to_bfloat16(value):
    """The upper half of a float32's bits, rounded, halves to even."""
    bits = F32(value).view(U32)
    return U16((bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))


@compiled("void(i1[:, ::1], f4[::1], f4[::1])")
def int8_to_float32(packed, scales, out):
    for block in range(scales.size):
        for i in range(BLOCK):
            out[block * BLOCK + i] = F32(packed[block, i]) * scales[block]


@compiled("void(i1[:, ::1], f4[::1], u2[::1])")
def int8_to_bfloat16(packed, scales, out):
    for block in range(scales.size):
        for i in range(BLOCK):
            out[block * BLOCK + i] = to_bfloat16(F32(packed[block, i]) * scales[block])


@compiled("void(u1[:, ::1], f4[::1], f4[::1])")
def nf4_to_float32(packed, scales, out):
    values = np.empty(16, F32)
    for block in range(scales.size):
        for code in range(16):
            values[code] = CODE[code] * scales[block]
        for i in range(BLOCK // 2):
            pair = packed[block, i]
            out[block * BLOCK + 2 * i] = values[pair >> 4]
            out[block * BLOCK + 2 * i + 1] = values[pair & 15]


@compiled("void(u1[:, ::1], f4[::1], u2[::1])")
def nf4_to_bfloat16(packed, scales, out):
    values = np.empty(16, U16)
    for block in range(scales.size):
        for code in range(16):
            values[code] = to_bfloat16(CODE[code] * scales[block])
        for i in range(BLOCK // 2):
            pair = packed[block, i]
            out[block * BLOCK + 2 * i] = values[pair >> 4]
            out[block * BLOCK + 2 * i + 1] = values[pair & 15]


def unpack(packed: Tensor, scales: Tensor, kind: Format, dtype: torch.dtype) -> Tensor:
    """Compute the reference's result in float32 or bfloat16."""
    flat = packed.new_empty(len(packed) * BLOCK, dtype=dtype)
    if dtype == torch.float32:
        function, out = int8_to_float32 if kind == "int8" else nf4_to_float32, flat
    else:
        function, out = int8_to_bfloat16 if kind == "int8" else nf4_to_bfloat16, flat.view(torch.uint16)
    function(packed.contiguous().numpy(), scales.contiguous().numpy(), out.numpy())
    return flat
