"""Compile Triton kernels for Ascend chips, and run the compiled code on the CPU, on a machine without an NPU.

`python -m tools.ascend` prints each kernel's resources on each chip. None of this runs on an NPU.
"""

from tools.ascend.chips import GATE_TARGETS, Chip, chip
from tools.ascend.errors import (
    AscendError,
    AscendLowerError,
    AscendToolchainError,
    CPUExecutionError,
    UBOverflow,
)
from tools.ascend.gate import complaints, kernel_cases
from tools.ascend.lower import Lowered, UBBuffer, lower

__all__ = [
    "GATE_TARGETS",
    "AscendError",
    "AscendLowerError",
    "AscendToolchainError",
    "CPUExecutionError",
    "Chip",
    "Lowered",
    "UBBuffer",
    "UBOverflow",
    "chip",
    "complaints",
    "kernel_cases",
    "lower",
]
