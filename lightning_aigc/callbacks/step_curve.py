"""A number of every step, which stays on its device until it is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc.report.record import Curve


class StepCurve:
    """A run's losses, or another number, by step. Adding one waits for nothing; the state is two flat tensors."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._packed = torch.empty(0)
        self._new: list[Tensor] = []

    def add(self, step: int, value: Tensor | float) -> None:
        """Add the first value of a step; later values of the same step are dropped."""
        if not self.steps or self.steps[-1] != step:
            self.steps.append(step)
            self._new.append(value.detach() if isinstance(value, Tensor) else torch.tensor(float(value)))

    def packed(self) -> Tensor:
        """Return all values, float32 [steps], on the device."""
        if self._new:
            new = torch.stack(self._new).float()
            self._packed, self._new = torch.cat([self._packed.to(new.device), new]), []
        return self._packed

    def curve(self) -> Curve:
        """Return the steps and values; waits for the device."""
        return Curve(list(self.steps), self.packed().tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": torch.tensor(self.steps, dtype=torch.int64), "losses": self.packed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._packed, self._new = state["steps"].tolist(), state["losses"], []
