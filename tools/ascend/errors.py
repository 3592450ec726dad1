"""Errors in lowering a kernel for an Ascend chip; every message says what to do."""

from __future__ import annotations


class AscendError(RuntimeError):
    """Base class of errors in `tools.ascend`."""


class AscendToolchainError(AscendError):
    """The compilers are missing, or upstream Triton is installed over them."""


class AscendLowerError(AscendError):
    """A compiler rejected the kernel.

    Attributes: stage ("ttir", "linalg" or "hivm"), reason (the compiler's error lines), log (its complete output).
    """

    def __init__(self, stage: str, reason: str, log: str = "") -> None:
        super().__init__(f"[{stage}] {reason}")
        self.stage, self.reason, self.log = stage, reason, log


class UBOverflow(AscendLowerError):  # noqa: N818 - the vendor's term
    """The kernel's buffers do not fit in the chip's on-chip memory.

    Attributes: required_bytes, available_bytes.
    """

    def __init__(self, memory: str, target: str, required_bytes: int, available_bytes: int, log: str = "") -> None:
        needs = f"the kernel needs {required_bytes} bytes" + ("" if memory == "UB" else f" of {memory}")
        super().__init__("hivm", f"{needs}, {target} has {available_bytes}; use a smaller BLOCK", log)
        self.args = (self.reason,)  # without the stage, which users do not need
        self.required_bytes, self.available_bytes = required_bytes, available_bytes


class CPUExecutionError(AscendError):
    """The lowered linalg could not be compiled for the CPU, or was called with wrong arguments."""
