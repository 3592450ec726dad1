"""The losses of a run, for diffusion by timestep, and which of them are spikes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_aigc.callbacks.health.history.history import History
from lightning_aigc.callbacks.health.thresholds import HealthThresholds

SHIFTED_LOSSES = (5, 9, 13)
"""Numbers of last losses whose median shows a lasting rise that single losses hide in their spread."""


@runtime_checkable
class ReportsExampleLosses(Protocol):
    """Has the per-example losses and timesteps of the last batch, both [B]."""

    last_example_losses: Tensor | None
    last_timesteps: Tensor | None


@dataclass(frozen=True)
class LossSpike:
    """A loss far above the ones before it."""

    layer: str
    loss: float
    median: float
    """Median of the earlier losses."""


class LossHistory:
    """A history for each bucket of timesteps: a diffusion loss depends on the timestep far more than on the weights.

    Args:
        limits: The length of a history, and how far up a spike is.
        timesteps: Timesteps of the noise schedule; 0 where the loss has none, and then there is one history.
        name: The layer that an alert names.
    """

    def __init__(self, limits: HealthThresholds, timesteps: int = 0, name: str = "loss") -> None:
        self.limits, self.timesteps, self.name = limits, timesteps, name
        self._histories: dict[int, History] = {}

    def add(
        self, losses: Sequence[float], timesteps: Sequence[int] | None, *, is_fitted: bool = False
    ) -> tuple[list[LossSpike], set[str]]:
        """Add a step's losses.

        Args:
            losses: One for each example, or one for the step where `timesteps` is None.
            is_fitted: Whether they are so small relative to the first losses that a jump does no harm.

        Returns: the spikes among them, and the layers that they belong to.
        """
        buckets: dict[int, list[float]] = {}
        for i, loss in enumerate(losses):
            bucket = -1 if timesteps is None else self._bucket(timesteps[i])
            buckets.setdefault(bucket, []).append(loss)
        spikes = []
        limits = self.limits
        by = (limits.loss_z, limits.loss_ratio)
        for bucket, values in buckets.items():
            history = self._histories.setdefault(bucket, History(limits.history, limits.min_history))
            mean = math.fsum(values) / len(values)
            if not is_fitted and (history.is_spike(mean, *by) or history.has_shifted(mean, *by, SHIFTED_LOSSES)):
                spikes.append(LossSpike(self.layer(bucket), mean, history.median()))
            for value in values:
                history.add(value)
        return spikes, {self.layer(bucket) for bucket in buckets}

    def layer(self, bucket: int) -> str:
        """The name of a bucket in an alert."""
        if bucket < 0:
            return self.name
        width = self.timesteps / self.limits.timestep_buckets
        return f"{self.name}.timesteps_{math.ceil(bucket * width)}_{math.ceil((bucket + 1) * width) - 1}"

    def _bucket(self, timestep: int) -> int:
        return min(int(timestep * self.limits.timestep_buckets / self.timesteps), int(self.limits.timestep_buckets) - 1)

    def state(self) -> dict[str, Any]:
        return {"timesteps": self.timesteps, "histories": {str(k): h.state() for k, h in self._histories.items()}}

    def load(self, state: dict[str, Any]) -> None:
        self.timesteps = state["timesteps"]
        for bucket, logs in state["histories"].items():
            history = History(self.limits.history, self.limits.min_history)
            history.load(logs)
            self._histories[int(bucket)] = history


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
