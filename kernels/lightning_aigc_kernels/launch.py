"""How the Triton kernels are cut into tiles and programs on each chip, and what of them an Ascend compiler is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LaunchConfig:
    """The sizes one kernel is launched with. No autotuning: a run's first step is as fast as its last."""

    tile: int
    """Elements a program holds at once; a power of two. On Ascend the unified buffer limits it (`ascend/` checks)."""
    programs: int
    """The most programs in a grid; the kernel loops when there is more work. Ascend stops at 65,535."""
    num_warps: int = 4
    """Warps of a CUDA block; Ascend and the interpreter ignore it."""

    @property
    def options(self) -> dict[str, int | bool]:
        """Triton's own launch options. Triton 3.9 warns unless told whether a product and a sum may be fused."""
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}

    def __post_init__(self) -> None:
        if self.tile < 1 or self.tile & (self.tile - 1):
            raise ValueError(f"tile must be a power of two, got {self.tile}")
        if not 1 <= self.programs <= 65_535:
            raise ValueError(f"programs must be in [1, 65535], got {self.programs}; an Ascend grid ends there")


@dataclass(frozen=True)
class KernelCase:
    """One way a kernel is compiled: what the gate lowers for every chip."""

    name: str
    function: object
    """The `@triton.jit` function."""
    signature: Mapping[str, str]
    """Triton's type of each argument that is not a constant: `*fp16`, `i32`, `fp32`."""
    constants: Mapping[str, int | bool] = field(default_factory=dict)


def config_for(device_type: str, table: Mapping[str, LaunchConfig]) -> LaunchConfig:
    """The row of a kernel's table for a tensor's device; "cpu" is Triton's interpreter.

    Raises: ValueError for a device outside the table.
    """
    if device_type not in table:
        raise ValueError(f"no Triton kernel for device {device_type!r}, only for {', '.join(table)}; use the reference")
    return table[device_type]


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make x's card the current one, where kernels are launched."""
    if x.device.type == "cpu":  # Triton's interpreter
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[object] = torch.get_device_module(x.device).device(x.device)
    return guard


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n and 1."""
    return 1 << max(n - 1, 0).bit_length()


def tile_shape(columns: int, tile: int, min_columns: int = 16) -> tuple[int, int]:
    """Rows and columns of a 2-D tile over rows of `columns` elements: whole rows while they fit, then several of them.

    Both are powers of two and their product is `tile`. Ascend pads each row of a tile to 32 bytes, hence `min_columns`.
    """
    block_columns = min(max(next_power_of_two(columns), min_columns), tile)
    return tile // block_columns, block_columns
