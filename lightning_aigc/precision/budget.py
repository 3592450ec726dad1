"""A memory budget in place of a level: what `memory` of FusedBackwardPrecision accepts beside the levels' names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_aigc.errors import ConfigError

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class MemoryBudget:
    """How much a step may save or need; one of the three."""

    kept: float | None = None
    """Share of the bytes that native autograd saves for backward."""
    peak_gb: float | None = None
    """GiB of a step's peak, with the model's weights, gradients and optimizer states."""
    fit: bool = False
    """As much as the card has."""

    def __str__(self) -> str:
        if self.fit:
            return "fit"
        return f"{{kept: {self.kept:g}}}" if self.kept is not None else f"{{peak_gb: {self.peak_gb:g}}}"

    def cannot(self, least: int, native: int, besides: int, int8_saves: int = 0) -> str:
        """The sentence for a budget below the least that can be had.

        Args: least and native are the bytes saved with every block run again and natively, besides those of a step's
            peak that no plan changes, int8_saves those that an int8 base would take off them.
        """
        if self.kept is not None:
            share = math.ceil(1000 * least / max(native, 1)) / 1000
            return (
                f"memory={self} cannot be met: with every block run again, {least / MIB:.4g} of native's"
                f" {native / MIB:.4g} MiB are still saved; use kept: {share:g} or more"
            )
        asks = f"use peak_gb: {math.ceil(1000 * (least + besides) / GIB) / 1000:g} or more,"
        if self.fit:
            asks = f"it needs {(least + besides) / GIB:.3g} GiB; use"
        packed = f" base_quantization: int8, which takes {int8_saves / GIB:.3g} GiB off," if int8_saves else ""
        return (
            f"memory={self} cannot be met: a step needs {besides / GIB:.3g} GiB besides activations, and with every"
            f" block run again {least / GIB:.3g} GiB of them are still saved; {asks}{packed} a smaller batch or smaller"
            " pictures"
        )


def read_budget(memory: object) -> MemoryBudget | None:
    """The budget that `memory` asks for, None if it names a level.

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
