"""Triton kernel that keeps the largest magnitudes of each row and zeroes the rest, for NVIDIA and Ascend.

Dimensions: R rows, L elements per row. Each program handles one row at a time, so a few long rows underuse a chip.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_aigc_kernels.kth_magnitude import copy_at_least, kth_largest_magnitude
from lightning_aigc_kernels.launch import KernelCase, LaunchConfig, config_for, on_device_of

CONFIGS = {"cuda": LaunchConfig(4096, 65_535, 8), "npu": LaunchConfig(2048, 960), "cpu": LaunchConfig(64, 3)}


@triton.jit
def keep_largest_rows(rows_ptr, kept_ptr, rows, length, keep, BLOCK: tl.constexpr):
    """Keep each row's `keep` largest magnitudes, ties included, and zero the rest."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * length
        threshold = kth_largest_magnitude(rows_ptr + start, length, keep, BLOCK)
        copy_at_least(rows_ptr + start, kept_ptr + start, length, threshold, BLOCK)


def keep_largest(rows_RL: Tensor, density: float) -> Tensor:
    """Keep each row's ceil(density * L) largest magnitudes, ties included, and zero the rest.

    Args: rows_RL is contiguous, in float32, float16 or bfloat16. NaN counts as infinite, is kept, and stays NaN.
    Raises: ValueError for a wrong shape, a strided tensor, or a density outside (0, 1].
    """
    if rows_RL.dim() != 2 or not rows_RL.is_contiguous():
        raise ValueError(f"rows must be contiguous [R, L], got {tuple(rows_RL.shape)}, strides {rows_RL.stride()}")
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}; use 1 to keep every number")
    rows, length = rows_RL.shape
    if rows_RL.numel() == 0 or density == 1:
        return rows_RL.clone()
    kept_RL = torch.empty_like(rows_RL)
    config = config_for(rows_RL.device.type, CONFIGS)
    with on_device_of(rows_RL):
        keep_largest_rows[(min(rows, config.programs),)](
            rows_RL,
            kept_RL,
            rows,
            length,
            math.ceil(density * length),
            BLOCK=config.tile,
            **config.options,
        )
    return kept_RL


def _case(chip: str, dtype: str) -> KernelCase:
    pointers = {"rows_ptr": f"*{dtype}", "kept_ptr": f"*{dtype}"}
    numbers = {"rows": "i32", "length": "i32", "keep": "i32"}
    return KernelCase(f"rows {dtype}", keep_largest_rows, pointers | numbers, {"BLOCK": CONFIGS[chip].tile})


def cases(chip: str) -> list[KernelCase]:
    """The compiled variants of the kernel for a chip."""
    return [_case(chip, dtype) for dtype in ("fp16", "bf16", "fp32")]


KERNELS: list[KernelCase] = cases("npu")
