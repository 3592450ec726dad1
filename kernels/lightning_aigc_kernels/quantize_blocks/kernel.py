"""Triton kernels that quantize blocks, and read or add them, for NVIDIA and Ascend; a launch each.

A tile is block k of some groups of a row, [groups, 32 lanes]; a program takes all eight blocks of its groups, whose
codes share bytes. See `layout.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, on_device_of
from lightning_aigc_kernels.quantize_blocks.layout import BITS, BLOCK, BLOCKS, GROUP, HUGE, TINY, scale_magnitude

CONFIGS = {"cuda": LaunchConfig(1024, 65_535, 4), "npu": LaunchConfig(256, 960), "cpu": LaunchConfig(64, 3)}
LANES = tl.constexpr(BLOCK)
BLOCKS_K = tl.constexpr(BLOCKS)
GROUP_N = tl.constexpr(GROUP)
TINY_SCALE = tl.constexpr(TINY)
HUGE_VALUE = tl.constexpr(HUGE)
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
"""Added and subtracted, it rounds what is below 2^22 to an integer, halves to even."""


@triton.jit
def place_of(tile, groups, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """A tile's first group, and where its row begins: as values, as scales, as codes."""
    per_row = tl.cdiv(groups, GROUPS)
    row = tl.cast(tile // per_row, tl.int64)
    first = (tile % per_row) * GROUPS
    scales_at = row * groups * (BLOCKS_K + LANES * BITS // 2)
    codes_at = row * groups * (2 * BLOCKS_K + LANES * BITS) + groups * (2 * BLOCKS_K)
    return first, row * groups * GROUP_N, scales_at, codes_at


@triton.jit
def scale_of(x, HALF: tl.constexpr):
    """The scales of blocks [groups, lanes] as float32, where they are too small to use, and where they are infinite."""
    magnitude = tl.where(tl.abs(x) < HUGE_VALUE, tl.abs(x), float("inf"))  # for NaN too
    largest, lowest = tl.max(magnitude, 1), tl.min(tl.where(tl.abs(x) < HUGE_VALUE, x, 0.0), 1)
    scale = tl.where(lowest == -largest, largest, -largest) * (1.0 / HALF)
    bits = scale.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536  # to bfloat16, halves to even, alike everywhere
    scale = rounded.to(tl.float32, bitcast=True)
    is_tiny, is_huge = tl.abs(scale) < TINY_SCALE, largest == float("inf")
    return tl.where(is_huge, float("inf"), tl.where(is_tiny, 0.0, scale)), is_tiny, is_huge


@triton.jit
def quantize(values_ptr, scales_ptr, codes_ptr, rows, groups, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Quantize values in place."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    lane = tl.arange(0, LANES)
    for tile in range(tl.program_id(0), rows * tl.cdiv(groups, GROUPS), tl.num_programs(0)):
        first, values_at, scales_at, codes_at = place_of(tile, groups, BITS, GROUPS)
        group = first + tl.arange(0, GROUPS)
        inside = group < groups
        values = values_ptr + values_at + (group * GROUP_N)[:, None] + lane[None, :]
        codes = codes_ptr + codes_at + (group * (LANES * BITS))[:, None] + lane[None, :]
        word = tl.zeros((GROUPS, LANES), tl.int32)
        for block in tl.static_range(BLOCKS_K):
            x = tl.load(values + block * LANES, mask=inside[:, None], other=0.0)
            scale, is_tiny, is_huge = scale_of(x, HALF)
            unusable = is_tiny | is_huge
            inverse = tl.where(unusable, 0.0, tl.div_rn(1.0, tl.where(unusable, 1.0, scale)))
            integer = (x * inverse[:, None] + TO_INTEGER) - TO_INTEGER
            integer = tl.where(integer < HALF - 1, integer, HALF - 1)
            integer = tl.where(is_huge[:, None], HALF - 1, integer)
            # Zero is added to make -0 to 0, as torch does.
            tl.store(values + block * LANES, (x - integer * scale[:, None]) + 0.0, mask=inside[:, None])
            tl.store(scales_ptr + scales_at + block * groups + group, scale.to(tl.bfloat16), mask=inside)
            code = (integer + HALF).to(tl.int32)
            if BITS == 8:
                tl.store(codes + block * LANES, code.to(tl.uint8), mask=inside[:, None])
            else:
                word = word | (code << (BITS * block))
        if BITS < 8:
            for byte in tl.static_range(BITS):
                tl.store(codes + byte * LANES, ((word >> (8 * byte)) & 255).to(tl.uint8), mask=inside[:, None])


@triton.jit
def read_block(word, codes, scales, block: tl.constexpr, inside, BITS: tl.constexpr):
    """The values of block `block` of some groups."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    scale = tl.load(scales, mask=inside, other=0.0).to(tl.float32)
    if BITS == 8:
        code = tl.load(codes + block * LANES, mask=inside[:, None], other=0).to(tl.int32)
    else:
        code = (word >> (BITS * block)) & (2 * HALF - 1)
    return (code.to(tl.float32) - HALF) * scale[:, None]


@triton.jit
def read_word(codes, inside, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """The codes of each lane as one integer; with 8 bits there is none."""
    word = tl.zeros((GROUPS, LANES), tl.int32)
    if BITS < 8:
        for byte in tl.static_range(BITS):
            part = tl.load(codes + byte * LANES, mask=inside[:, None], other=0).to(tl.int32)
            word = word | (part << (8 * byte))
    return word


@triton.jit
def dequantize(values_ptr, scales_ptr, codes_ptr, rows, groups, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Write the values of all rows."""
    lane = tl.arange(0, LANES)
    for tile in range(tl.program_id(0), rows * tl.cdiv(groups, GROUPS), tl.num_programs(0)):
        first, values_at, scales_at, codes_at = place_of(tile, groups, BITS, GROUPS)
        group = first + tl.arange(0, GROUPS)
        inside = group < groups
        values = values_ptr + values_at + (group * GROUP_N)[:, None] + lane[None, :]
        codes = codes_ptr + codes_at + (group * (LANES * BITS))[:, None] + lane[None, :]
        word = read_word(codes, inside, BITS, GROUPS)
        for block in tl.static_range(BLOCKS_K):
            scales = scales_ptr + scales_at + block * groups + group
            value = read_block(word, codes, scales, block, inside, BITS)
            tl.store(values + block * LANES, value, mask=inside[:, None])


@triton.jit
def add_rows(values_ptr, scales_ptr, codes_ptr, rows, groups, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Add the values of all rows to one, row after row."""
    lane = tl.arange(0, LANES)
    for tile in range(tl.program_id(0), tl.cdiv(groups, GROUPS), tl.num_programs(0)):
        group = tile * GROUPS + tl.arange(0, GROUPS)
        inside = group < groups
        for block in tl.static_range(BLOCKS_K):
            values = values_ptr + (group * GROUP_N)[:, None] + block * LANES + lane[None, :]
            total = tl.load(values, mask=inside[:, None], other=0.0)
            for row in range(rows):
                _, _, scales_at, codes_at = place_of(row * tl.cdiv(groups, GROUPS), groups, BITS, GROUPS)
                codes = codes_ptr + codes_at + (group * (LANES * BITS))[:, None] + lane[None, :]
                word = read_word(codes, inside, BITS, GROUPS)
                scales = scales_ptr + scales_at + block * groups + group
                total += read_block(word, codes, scales, block, inside, BITS)
            tl.store(values, total, mask=inside[:, None])


def quantize_blocks(values_RN: Tensor, packed_RB: Tensor, bits: int) -> None:
    """Compute the reference's result in one launch."""
    _launch(quantize, values_RN, packed_RB, bits)


def dequantize_blocks(packed_RB: Tensor, out_RN: Tensor, bits: int) -> Tensor:
    """Compute the reference's result; the check is a second launch."""
    _launch(dequantize, out_RN, packed_RB, bits)
    return scale_magnitude(packed_RB, out_RN.shape[1])


def add_quantized_rows(packed_RB: Tensor, out_N: Tensor, bits: int) -> None:
    """Compute the reference's result in one launch."""
    _launch(add_rows, out_N.view(1, -1), packed_RB, bits)


def _launch(kernel, values_RN: Tensor, packed_RB: Tensor, bits: int) -> None:
    """Launch a kernel over all tiles of values_RN."""
    if values_RN.numel() == 0 or packed_RB.numel() == 0:
        return
    config = config_for(values_RN.device.type, CONFIGS)
    groups, at_a_time = values_RN.shape[1] // GROUP, config.tile // BLOCK
    tiles = len(values_RN) * triton.cdiv(groups, at_a_time)
    # A product and a sum must not become one operation, which rounds once: the bits would be others on other devices.
    options = {**config.options, "enable_fp_fusion": False}
    with on_device_of(values_RN):
        kernel[(min(tiles, config.programs),)](
            values_RN,
            packed_RB.view(torch.bfloat16),
            packed_RB,
            len(packed_RB),
            groups,
            BITS=bits,
            GROUPS=at_a_time,
            **options,
        )


def _case(chip: str, kernel, bits: int) -> KernelCase:
    kinds = {"values_ptr": "*fp32", "scales_ptr": "*bf16", "codes_ptr": "*u8", "rows": "i32", "groups": "i32"}
    signature = {name: kinds[name] for name in kernel.arg_names if name in kinds}
    constants = {"BITS": bits, "GROUPS": CONFIGS[chip].tile // BLOCK}
    return KernelCase(f"{kernel.__name__} {bits} bits", kernel, signature, constants)


def cases(chip: str) -> list[KernelCase]:
    """The compiled variants of the kernels for a chip."""
    return [_case(chip, kernel, bits) for kernel in (quantize, dequantize, add_rows) for bits in BITS]


KERNELS: list[KernelCase] = cases("npu")
