"""The losses of an accumulation window's micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_aigc.protocols import ReportsExampleLosses


class WindowLosses:
    """Collects each micro-batch's loss and, where the module reports them, its examples' losses and timesteps."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._examples: list[tuple[Tensor, Tensor]] = []

    def add(self, loss: Tensor, module: object) -> None:
        """Add a micro-batch, before its backward."""
        self._losses.append(loss.detach())
        if isinstance(module, ReportsExampleLosses):
            losses, timesteps = module.last_example_losses, module.last_timesteps
            if isinstance(losses, Tensor) and isinstance(timesteps, Tensor):
                self._examples.append((losses.detach(), timesteps))

    def total(self) -> Tensor | None:
        """The window's loss, still scaled: Lightning divides each micro-batch's by how many there are."""
        if len(self._losses) == 1:
            return self._losses[0]
        return torch.stack([loss.float().reshape(()) for loss in self._losses]).sum() if self._losses else None

    def examples(self) -> tuple[Tensor, Tensor] | None:
        """Losses and timesteps of the window's examples."""
        if len(self._examples) <= 1:
            return self._examples[0] if self._examples else None
        losses, timesteps = (torch.cat([pair[i].reshape(-1) for pair in self._examples]) for i in (0, 1))
        return losses, timesteps

    def clear(self) -> None:
        """Begin the next window."""
        self._losses, self._examples = [], []
