"""Triton kernels that unpack a weight, for NVIDIA and Ascend.

Dimensions: B blocks of 64 numbers. A program handles a tile of complete blocks at a time.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, on_device_of
from lightning_aigc_kernels.packed_weight.reference import BLOCK

CONFIGS = {"cuda": LaunchConfig(4096, 65_535, 8), "npu": LaunchConfig(4096, 960), "cpu": LaunchConfig(256, 3)}
"""A tile is counted in numbers."""


@triton.jit
def code_of(index):
    """NF4's number of an index 0..15, float32. Selects, because a table would be read one element at a time."""
    low = tl.where(index < 1, -1.0, tl.where(index < 2, -0.6961928009986877, -0.5250730514526367))
    low = tl.where(index < 3, low, tl.where(index < 4, -0.39491748809814453, -0.28444138169288635))
    middle = tl.where(index < 6, -0.18477343022823334, tl.where(index < 7, -0.09105003625154495, 0.0))
    low = tl.where(index < 5, low, middle)
    high = tl.where(index < 9, 0.07958029955625534, tl.where(index < 10, 0.16093020141124725, 0.24611230194568634))
    last = tl.where(index < 12, 0.33791524171829224, tl.where(index < 13, 0.44070982933044434, 0.5626170039176941))
    last = tl.where(index < 14, last, tl.where(index < 15, 0.7229568362236023, 1.0))
    high = tl.where(index < 11, high, last)
    return tl.where(index < 8, low, high)


@triton.jit
def unpack_nf4(packed_ptr, scales_ptr, values_ptr, blocks, TILE: tl.constexpr):
    """values = code * scale; a byte's high half is the number before its low half's."""
    for tile in range(tl.program_id(0), tl.cdiv(blocks, TILE), tl.num_programs(0)):
        block = tl.arange(0, TILE)
        inside = (tile * TILE + block < blocks)[:, None]
        first = tl.cast(tile, tl.int64) * TILE
        offsets = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        packed = tl.load(packed_ptr + first * 32 + offsets, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scales_ptr + first + block[:, None], mask=inside, other=0.0)
        high = code_of(packed >> 4) * scale
        low = code_of(packed & 15) * scale
        values = tl.interleave(high, low).to(values_ptr.dtype.element_ty)
        places = block[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(values_ptr + first * 64 + places, values, mask=inside)


@triton.jit
def unpack_int8(packed_ptr, scales_ptr, values_ptr, blocks, TILE: tl.constexpr):
    """values = byte * scale."""
    for tile in range(tl.program_id(0), tl.cdiv(blocks, TILE), tl.num_programs(0)):
        block = tl.arange(0, TILE)
        inside = (tile * TILE + block < blocks)[:, None]
        first = tl.cast(tile, tl.int64) * TILE
        places = block[:, None] * 64 + tl.arange(0, 64)[None, :]
        packed = tl.load(packed_ptr + first * 64 + places, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scales_ptr + first + block[:, None], mask=inside, other=0.0)
        tl.store(values_ptr + first * 64 + places, (packed * scale).to(values_ptr.dtype.element_ty), mask=inside)


def unpack(packed: Tensor, scales: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The numbers of all blocks, flat, in `dtype`: float32, float16 or bfloat16.

    Args: packed contiguous [B, 32] uint8 for nf4, [B, 64] int8 for int8; scales float32 [B].
    Raises: ValueError for other shapes.
    """
    width = 32 if kind == "nf4" else BLOCK
    if packed.dim() != 2 or packed.shape[1] != width or scales.shape != packed.shape[:1] or not packed.is_contiguous():
        got = f"{tuple(packed.shape)} and {tuple(scales.shape)}"
        raise ValueError(f"{kind} wants contiguous bytes [B, {width}] and scales [B], got {got}")
    blocks = len(packed)
    values = packed.new_empty(blocks * BLOCK, dtype=dtype)
    if not blocks:
        return values
    config = config_for(packed.device.type, CONFIGS)
    tile = config.tile // BLOCK
    function = unpack_nf4 if kind == "nf4" else unpack_int8
    with on_device_of(packed):
        function[(min(triton.cdiv(blocks, tile), config.programs),)](
            packed, scales, values, blocks, TILE=tile, **config.options
        )
    return values


def _case(chip: str, kind: str, dtype: str) -> KernelCase:
    function = unpack_nf4 if kind == "nf4" else unpack_int8
    pointers = {"packed_ptr": "*u8" if kind == "nf4" else "*i8", "scales_ptr": "*fp32", "values_ptr": f"*{dtype}"}
    constants = {"TILE": CONFIGS[chip].tile // BLOCK}
    return KernelCase(f"{kind} {dtype}", function, pointers | {"blocks": "i32"}, constants)


def cases(chip: str) -> list[KernelCase]:
    """The compiled variants of the kernels for a chip."""
    return [_case(chip, kind, dtype) for kind in ("nf4", "int8") for dtype in ("fp16", "bf16", "fp32")]


KERNELS: list[KernelCase] = cases("npu")
