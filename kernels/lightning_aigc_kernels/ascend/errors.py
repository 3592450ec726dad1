"""What can go wrong while a kernel is lowered for an Ascend chip; every message says what to do."""

from __future__ import annotations


class AscendError(RuntimeError):
    """Any failure of `lightning_aigc_kernels.ascend`."""


class AscendToolchainError(AscendError):
    """The compilers are missing, or upstream Triton stands in their place."""


class AscendLowerError(AscendError):
    """A compiler refused the kernel.

    Attributes: stage ("ttir", "linalg" or "hivm"), reason (the compiler's own lines), log (all it printed).
    """

    def __init__(self, stage: str, reason: str, log: str = "") -> None:
        super().__init__(f"[{stage}] {reason}")
        self.stage, self.reason, self.log = stage, reason, log


class UBOverflow(AscendLowerError):  # noqa: N818 - the vendor's own words
    """The kernel's buffers do not fit in the chip's on-chip memory.

    Attributes: required_bytes, available_bytes.
    """

    def __init__(self, memory: str, target: str, required_bytes: int, available_bytes: int, log: str = "") -> None:
        needs = f"the kernel needs {required_bytes} bytes" + ("" if memory == "UB" else f" of {memory}")
        super().__init__("hivm", f"{needs}, {target} has {available_bytes}; use a smaller BLOCK", log)
        self.args = (self.reason,)  # a user knows no stages
        self.required_bytes, self.available_bytes = required_bytes, available_bytes


class CPUExecutionError(AscendError):
    """The lowered linalg could not be turned into CPU code, or was called with other arguments than it takes."""
