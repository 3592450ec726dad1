"""Residuals of error feedback: the part of each gradient that a step did not send, added to the next gradient.

Source: Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback fixes
SignSGD, arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups
from lightning_aigc.gradient_sync.units import FlatUnit, own_shard


class Residuals:
    """Two flat float32 vectors for each compressed unit: the residual, and that of the next step.

    A reduction works in `next_of(unit)`, where it leaves the part that it did not send. Only `commit` exchanges the
    two, so a step that is not finite changes nothing.
    """

    def __init__(
        self, units: Sequence[FlatUnit], groups: ProcessGroups, device: torch.device, *, error_feedback: bool
    ) -> None:
        self.error_feedback = error_feedback
        self.units = units
        self._shards = {unit.index: own_shard(unit, groups) for unit in units}
        self._residual = self._zeros(device)
        self._next_residual = self._zeros(device)

    def of(self, unit: FlatUnit) -> Tensor:
        """Return the residual that the last committed step left, [values of the unit that this rank compresses]."""
        return self._residual[unit.index]

    def next_of(self, unit: FlatUnit) -> Tensor:
        """Return the vector that becomes the residual when this step is committed."""
        return self._next_residual[unit.index]

    def commit(self) -> None:
        """Keep the residuals that the step left."""
        if self.error_feedback:
            self._residual, self._next_residual = self._next_residual, self._residual

    def rollback(self) -> None:
        """Keep the residuals from before the step, which was not finite."""
        for vector in self._next_residual.values():  # the padding may be NaN too, and nothing else overwrites it
            vector.zero_()

    def by_name(self) -> dict[str, Any]:
        """Return CPU copies of each parameter's part on this rank: {"start": index of its first value, "values": flat}.

        State is stored by name, because units may differ in the next run.
        """
        named = {}
        for unit in self.units:
            start, vector = self._shards[unit.index][0], self.of(unit).cpu()
            for entry in unit.entries:
                low, high = max(entry.start, start), min(entry.stop, start + vector.numel())
                if low < high:
                    values = vector[low - start : high - start].clone()
                    named[entry.name] = {"start": low - entry.start, "values": values}
        return named

    def load_residuals(self, saved: Sequence[dict[str, Any]], factor: float) -> None:
        """Set each residual to the sum of those in `saved`, which `by_name` returned on some ranks, times `factor`.

        A parameter that is in none of them starts without a residual.
        """
        for unit in self.units:
            start, vector = self._shards[unit.index][0], self.of(unit)
            vector.zero_()
            for entry in unit.entries:
                for of_rank in saved:
                    if entry.name not in of_rank:
                        continue
                    low, values = entry.start + int(of_rank[entry.name]["start"]), of_rank[entry.name]["values"]
                    first, end = max(low, start), min(low + values.numel(), start + vector.numel())
                    if first < end:
                        part = values[first - low : end - low].to(vector.device)
                        vector[first - start : end - start].add_(part, alpha=factor)

    def _zeros(self, device: torch.device) -> dict[int, Tensor]:
        return {index: torch.zeros(length, device=device) for index, (_, length) in self._shards.items()}
