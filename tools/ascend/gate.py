"""The gate: checks that every Triton kernel must pass before it may run on an Ascend chip."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from lightning_aigc_kernels.launch import KernelCase
from tools.ascend.lower import Lowered

OPS = (
    "group_norm_silu",
    "geglu",
    "keep_largest",
    "modulated_norm",
    "packed_weight",
    "qk_norm_rope",
    "quantize_blocks",
    "silu_mul",
)
UB_SHARE_LIMIT = 0.85
"""Largest share of the unified buffer in use; the rest is a margin for later compiler versions."""


def kernel_cases() -> Iterator[tuple[str, KernelCase]]:
    """Yield each op's name with each of its cases.

    Raises: ImportError without Triton.
    """
    for op in OPS:
        for case in importlib.import_module(f"lightning_aigc_kernels.{op}.kernel").KERNELS:
            yield op, case


def complaints(lowered: Lowered) -> list[str]:
    """The reasons why a lowered kernel fails the gate; empty if it passes."""
    found = [f"the compiler dropped an optimization: {note}" for note in lowered.notes]
    if lowered.scalar_loops:
        found.append(f"{len(lowered.scalar_loops)} accesses run one element at a time: {lowered.scalar_loops[0]}")
    if lowered.ub_share > UB_SHARE_LIMIT:
        used = f"{lowered.ub_peak_bytes} of {lowered.ub_limit_bytes} bytes of the unified buffer"
        found.append(f"{used} are used, more than {UB_SHARE_LIMIT:.0%}; use a smaller tile")
    return found
