"""Loss spikes: a loss far above its own history, for diffusion within its bucket of timesteps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_aigc.callbacks.health.alert import Finding
from lightning_aigc.callbacks.health.history import History
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.thresholds import HealthThresholds

SHIFTED_LOSSES = (5, 9, 13)
"""Losses whose median tells one that has grown for good from the spread of single ones."""


class LossHistory:
    """One history a bucket of timesteps, since a diffusion loss depends on the timestep far more than on the weights.

    Args:
        limits: Length of the histories and what is a spike.
        timesteps: Timesteps of the noise schedule; 0 where the loss has none: one history for all.
        name: How an alert calls it.
    """

    def __init__(self, limits: HealthThresholds, timesteps: int = 0, name: str = "loss") -> None:
        self.limits, self.timesteps, self.name = limits, timesteps, name
        self._histories: dict[int, History] = {}

    def check(
        self, losses: Sequence[float], timesteps: Sequence[int] | None, remedies: Remedies, *, is_fitted: bool = False
    ) -> tuple[list[Finding], set[str]]:
        """Remember a step's losses.

        Args:
            losses: One an example, or one for the step where `timesteps` is None.
            is_fitted: They are so small beside the first ones that a jump among them does no harm.

        Returns: the findings, and the layers that were looked at.
        """
        buckets: dict[int, list[float]] = {}
        for i, loss in enumerate(losses):
            bucket = -1 if timesteps is None else self._bucket(timesteps[i])
            buckets.setdefault(bucket, []).append(loss)
        findings = []
        for bucket, values in buckets.items():
            limits = self.limits
            history = self._histories.setdefault(bucket, History(limits.history, limits.min_history))
            mean = math.fsum(values) / len(values)
            by = (limits.loss_z, limits.loss_ratio)
            if not is_fitted and (history.is_spike(mean, *by) or history.has_shifted(mean, *by, SHIFTED_LOSSES)):
                findings.append(self._finding(bucket, mean, history, remedies))
            for value in values:
                history.add(value)
        return findings, {self.layer(bucket) for bucket in buckets}

    def layer(self, bucket: int) -> str:
        """How an alert calls a bucket."""
        if bucket < 0:
            return self.name
        width = self.timesteps / self.limits.timestep_buckets
        return f"{self.name}.timesteps_{math.ceil(bucket * width)}_{math.ceil((bucket + 1) * width) - 1}"

    def _bucket(self, timestep: int) -> int:
        return min(int(timestep * self.limits.timestep_buckets / self.timesteps), int(self.limits.timestep_buckets) - 1)

    def _finding(self, bucket: int, loss: float, history: History, remedies: Remedies) -> Finding:
        return Finding(
            "loss_spike",
            self.layer(bucket),
            "warning",
            f"the loss is {loss:.3g}, {loss / history.median():.1f} times its median there",
            "pictures unlike the others in these batches, or a learning rate that is too high",
            remedies.learning_rate(0.5),
        )

    def state(self) -> dict[str, Any]:
        return {"timesteps": self.timesteps, "histories": {str(k): h.state() for k, h in self._histories.items()}}

    def load(self, state: dict[str, Any]) -> None:
        self.timesteps = state["timesteps"]
        for bucket, logs in state["histories"].items():
            history = History(self.limits.history, self.limits.min_history)
            history.load(logs)
            self._histories[int(bucket)] = history
