"""Ascend chips by the vendor compiler's target names, with the unified buffer of each family."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One compile target."""

    target: str
    unified_buffer_bytes: int
    """Size of a vector core's unified buffer, from the compiler's overflow message."""
    compiler: str
    """The ascendnpu-ir binary for the chip."""

    @property
    def is_950(self) -> bool:
        return self.compiler == "bishengir-compile-a5"


# Source: "bits available" in overflow messages of ascendnpu-ir 1.2.0, from kernels that do not fit.
_FAMILIES = (
    (re.compile(r"Ascend910_95\w+|Ascend950(PR|DT)_\w+"), 253_952, "bishengir-compile-a5"),
    (re.compile(r"Ascend910B[1-4](-1|C)?|Ascend910_93[6-9]\d"), 196_608, "bishengir-compile"),
)

GATE_TARGETS = ("Ascend910B1", "Ascend910_9382", "Ascend950PR_9589")
"""One chip of each family used for training: Atlas A2, Atlas A3, and the 950."""


def chip(target: str) -> Chip:
    """The chip of a compile target.

    Raises: ValueError for a name outside the known families (Ascend310P and 910A have no Triton back end).
    """
    for pattern, unified_buffer_bytes, compiler in _FAMILIES:
        if pattern.fullmatch(target):
            return Chip(target, unified_buffer_bytes, compiler)
    raise ValueError(f"unknown Ascend target {target!r}; use one like {', '.join(GATE_TARGETS)}")
