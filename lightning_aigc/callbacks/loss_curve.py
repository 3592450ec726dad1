"""The loss of every step, left on its device until someone reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossCurve:
    """Adding a step waits for nothing; the state is two flat tensors."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._packed = torch.empty(0)
        self._new: list[Tensor] = []

    def add(self, step: int, loss: Tensor) -> None:
        """The first loss of a step; further ones of the same step are left out."""
        if not self.steps or self.steps[-1] != step:
            self.steps.append(step)
            self._new.append(loss.detach())

    def packed(self) -> Tensor:
        """All of them, float32 [steps]."""
        if self._new:
            new = torch.stack(self._new).float()
            self._packed, self._new = torch.cat([self._packed.to(new.device), new]), []
        return self._packed

    def points(self) -> list[tuple[float, float]]:
        return list(zip(self.steps, self.packed().tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": torch.tensor(self.steps, dtype=torch.int64), "losses": self.packed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._packed, self._new = state["steps"].tolist(), state["losses"], []
