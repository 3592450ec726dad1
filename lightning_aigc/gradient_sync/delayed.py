"""The delayed step: each step applies the sums of the step before, so that its own may travel meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_aigc.gradient_sync.flat_units import FlatUnit
from lightning_aigc.host_state import to_cpu


class DelayedSums:
    """The last step's sums, which this step applies, and the pending ones of this step, by unit."""

    def __init__(self, units: Sequence[FlatUnit], device: torch.device) -> None:
        self._units, self._device = units, device
        self._delayed_sum: dict[int, Tensor] = {}
        self._pending_sum: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []

    def delayed(self, unit: FlatUnit) -> Tensor:
        """Return what the last step's gradients of this unit came to; zeros in the first step."""
        total = self._delayed_sum.get(unit.index)
        return torch.zeros(unit.numel, device=self._device) if total is None else total

    def set_pending(self, unit: FlatUnit, total: Tensor) -> None:
        self._pending_sum[unit.index] = total

    def keep(self, flat: Tensor) -> None:
        """Keep a vector until the step ends: one stream made it, and another reads it that the first does not await."""
        self._kept.append(flat)

    def advance(self) -> None:
        """End the step: its sums are the next one's."""
        self._delayed_sum, self._pending_sum = self._pending_sum, {}
        self._kept = []

    def by_name(self) -> dict[str, Tensor]:
        """Return CPU copies of the sums that the next step applies, by parameter."""
        return {
            entry.name: to_cpu(self._delayed_sum[unit.index][entry.start : entry.stop], clone=True)
            for unit in self._units
            if unit.index in self._delayed_sum
            for entry in unit.entries
        }

    def load_sums(self, saved: dict[str, Tensor]) -> bool:
        """Take what `by_name` returned; returns whether these sums are finite, so that their step counts."""
        self._delayed_sum = {unit.index: torch.zeros(unit.numel, device=self._device) for unit in self._units}
        for unit in self._units:
            for entry in unit.entries:
                if entry.name in saved:
                    self._delayed_sum[unit.index][entry.start : entry.stop] = saved[entry.name].to(self._device)
        return all(bool(torch.isfinite(total.sum())) for total in self._delayed_sum.values())
