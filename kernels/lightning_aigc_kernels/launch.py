"""Launch configurations of the Triton kernels per chip, and the kernel variants that the Ascend gate compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LaunchConfig:
    """Launch sizes of a kernel. Fixed instead of autotuned, so that a run's first step is as fast as its last."""

    tile: int
    """Elements per program at a time, a power of two; on Ascend the unified buffer limits it (see tools/ascend)."""
    programs: int
    """Largest number of programs in a grid; kernels loop over more work. Ascend's limit is 65,535."""
    num_warps: int = 4
    """Warps of a CUDA block; Ascend and the interpreter ignore it."""

    @property
    def options(self) -> dict[str, int | bool]:
        """Triton's launch options. Triton 3.9 warns if `enable_fp_fusion` is not set."""
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}

    def __post_init__(self) -> None:
        if self.tile < 1 or self.tile & (self.tile - 1):
            raise ValueError(f"tile must be a power of two, got {self.tile}")
        if not 1 <= self.programs <= 65_535:
            raise ValueError(f"programs must be in [1, 65535], got {self.programs}; Ascend allows no larger grid")


@dataclass(frozen=True)
class KernelCase:
    """A variant of a kernel, with its signature and constants, that the gate lowers for every chip."""

    name: str
    function: object
    """The `@triton.jit` function."""
    signature: Mapping[str, str]
    """The Triton type of each non-constant argument: `*fp16`, `i32`, `fp32`."""
    constants: Mapping[str, int | bool] = field(default_factory=dict)


def config_for(device_type: str, table: Mapping[str, LaunchConfig]) -> LaunchConfig:
    """The LaunchConfig for a device type; "cpu" is Triton's interpreter.

    Raises: ValueError for a device outside the table.
    """
    if device_type not in table:
        raise ValueError(f"no Triton kernel for device {device_type!r}, only for {', '.join(table)}; use the reference")
    return table[device_type]


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make x's device current, for kernel launches."""
    if x.device.type == "cpu":  # Triton's interpreter
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[object] = torch.get_device_module(x.device).device(x.device)
    return guard


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least max(n, 1)."""
    return 1 << max(n - 1, 0).bit_length()


def tile_shape(columns: int, tile: int, min_columns: int = 16) -> tuple[int, int]:
    """Rows and columns of a 2-D tile over rows of `columns` elements: part of a row, or several short rows.

    Both are powers of two with product `tile`. Ascend pads each row of a tile to 32 bytes, hence `min_columns`.
    """
    block_columns = min(max(next_power_of_two(columns), min_columns), tile)
    return tile // block_columns, block_columns
