"""The loss of every step, which stays on its device until it is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossCurve:
    """A run's losses by step. Adding one waits for nothing; the state is two flat tensors."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._packed = torch.empty(0)
        self._new: list[Tensor] = []

    def add(self, step: int, loss: Tensor) -> None:
        """Add the first loss of a step; later losses of the same step are dropped."""
        if not self.steps or self.steps[-1] != step:
            self.steps.append(step)
            self._new.append(loss.detach())

    def packed(self) -> Tensor:
        """Return all losses, float32 [steps], on the device."""
        if self._new:
            new = torch.stack(self._new).float()
            self._packed, self._new = torch.cat([self._packed.to(new.device), new]), []
        return self._packed

    def points(self) -> list[tuple[float, float]]:
        """Return (step, loss) pairs; waits for the device."""
        return list(zip(self.steps, self.packed().tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": torch.tensor(self.steps, dtype=torch.int64), "losses": self.packed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._packed, self._new = state["steps"].tolist(), state["losses"], []
