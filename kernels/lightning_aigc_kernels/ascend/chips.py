"""Ascend chips by the names that the vendor's compiler takes, and the unified buffer of each family."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One compile target."""

    target: str
    unified_buffer_bytes: int
    """What the compiler's overflow message names as available to one vector core."""
    compiler: str
    """The binary of ascendnpu-ir that knows the chip."""

    @property
    def is_950(self) -> bool:
        return self.compiler == "bishengir-compile-a5"


# Source: the "bits available" of overflow messages of ascendnpu-ir 1.2.0, measured with kernels that do not fit.
_FAMILIES = (
    (re.compile(r"Ascend910_95\w+|Ascend950(PR|DT)_\w+"), 253_952, "bishengir-compile-a5"),
    (re.compile(r"Ascend910B[1-4](-1|C)?|Ascend910_93[6-9]\d"), 196_608, "bishengir-compile"),
)

GATE_TARGETS = ("Ascend910B1", "Ascend910_9382", "Ascend950PR_9589")
"""One chip of each family people train on: Atlas A2, Atlas A3, and the 950."""


def chip(target: str) -> Chip:
    """The chip of a compile target.

    Raises: ValueError for a name of no known family (Ascend310P and 910A have no Triton back end).
    """
    for pattern, unified_buffer_bytes, compiler in _FAMILIES:
        if pattern.fullmatch(target):
            return Chip(target, unified_buffer_bytes, compiler)
    raise ValueError(f"unknown Ascend target {target!r}; use one like {', '.join(GATE_TARGETS)}")
