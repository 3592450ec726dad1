"""Values of FusedBackwardPrecision's `memory` argument: a level, or a budget for a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_aigc.errors import ConfigError

MIB, GIB = 2**20, 2**30
MemoryLevel = Literal["off", "balanced", "lean", "max"]


@dataclass(frozen=True)
class MemoryBudget:
    """Memory that a step may use; exactly one field is set."""

    kept: float | None = None
    """Share of the bytes that native autograd saves for backward."""
    peak_gb: float | None = None
    """GiB of a step's peak, with the model's weights, gradients and optimizer states."""
    fit: bool = False
    """All memory of the device."""

    def __str__(self) -> str:
        if self.fit:
            return "fit"
        return f"{{kept: {self.kept:g}}}" if self.kept is not None else f"{{peak_gb: {self.peak_gb:g}}}"

    def too_small_message(self, least: int, native: int, other_bytes: int, int8_saves: int = 0) -> str:
        """Return the error message for a budget that cannot be met.

        Args:
            least: Bytes saved when every block is recomputed.
            native: Bytes saved without the plugin.
            other_bytes: Bytes of a step's peak that are not saved activations.
            int8_saves: Reduction of `other_bytes` with an int8 base.
        """
        if self.kept is not None:
            share = math.ceil(1000 * least / max(native, 1)) / 1000
            return (
                f"memory={self} cannot be met: with every block run again, {least / MIB:.4g} of native's"
                f" {native / MIB:.4g} MiB are still saved; use kept: {share:g} or more"
            )
        asks = f"use peak_gb: {math.ceil(1000 * (least + other_bytes) / GIB) / 1000:g} or more,"
        if self.fit:
            asks = f"it needs {(least + other_bytes) / GIB:.3g} GiB; use"
        packed = f" base_quantization: int8, which takes {int8_saves / GIB:.3g} GiB off," if int8_saves else ""
        return (
            f"memory={self} cannot be met: a step needs {other_bytes / GIB:.3g} GiB without activations, and with every"
            f" block run again {least / GIB:.3g} GiB of them are still saved; {asks}{packed} a smaller batch or smaller"
            " images"
        )


def read_budget(memory: object) -> MemoryBudget | None:
    """Read the budget in the `memory` argument; None if it names a level.

    Raises: ConfigError for a mapping that is no budget.
    """
    if memory == "fit":
        return MemoryBudget(fit=True)
    if isinstance(memory, MemoryBudget):
        memory = {key: value for key, value in vars(memory).items() if value not in (None, False)}
    if not isinstance(memory, Mapping):
        return None
    if set(memory) not in ({"kept"}, {"peak_gb"}):
        raise ConfigError(f"memory as a budget is {{kept: 0.18}} or {{peak_gb: 6}}, one of them, got {dict(memory)!r}")
    ((name, value),) = memory.items()
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"memory.{name} must be a number above 0, got {value!r}")
    if name == "kept" and value > 1:
        percent = f"; for {value:g} % write {value / 100:g}" if value <= 100 else ""
        raise ConfigError(f"memory.kept is a share of what native autograd saves, at most 1, got {value!r}{percent}")
    return MemoryBudget(kept=float(value)) if name == "kept" else MemoryBudget(peak_gb=float(value))
