"""Losses, gradient norms and weights of one optimizer's steps, against which the next one is judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_aigc.callbacks.health.history import History, RecentValues
from lightning_aigc.callbacks.health.loss_history import LossHistory
from lightning_aigc.callbacks.health.parameter_stats import Named, ParameterStats
from lightning_aigc.callbacks.health.thresholds import HealthThresholds
from lightning_aigc.callbacks.health.training_stage import StageTracker
from lightning_aigc.callbacks.health.weight_samples import WeightSamples


class OptimizerHistory:
    """The histories of one optimizer's losses and gradients, and the weights that it moves.

    Args:
        limits: The thresholds.
        number: Which of the run's optimizers it is; the first one's loss is called `loss`, the second one's
            `loss.optimizer_1`.
    """

    def __init__(self, limits: HealthThresholds, number: int = 0) -> None:
        self.losses = LossHistory(limits, name=f"loss.optimizer_{number}" if number else "loss")
        self.all_norms = History(limits.history, limits.min_history)
        """Norms of all gradients together."""
        self.unclipped_norms = RecentValues(limits.history)
        self.stage = StageTracker()
        self.steps = 0
        """Steps so far."""
        self.named: Named = []
        """The parameters whose gradients are read."""
        self.samples: WeightSamples | None = None
        self.ratios: Tensor | None = None
        """How far the last step moved each weight, still on the device."""
        self.moving: list[bool] = []
        """Whether each sampled weight had a gradient at that step, where it was sampled."""
        self.farthest: tuple[float, str] | None = None
        """Ratio and name of the weight that a step moved too far, as long as the loss has not come back since."""

    def attach(self, named: Named) -> None:
        """Sample the parameters as they are when training starts."""
        self.named = named
        self.samples = WeightSamples(named) if named else None

    def take_weights(self, stats: ParameterStats | None) -> None:
        """Sample the weights before a step, to measure how far it moves them.

        Args: stats: the step's; a weight whose sampled gradient is all zero, such as a kernel of which one tap has one,
            is not expected to move where it is sampled.
        """
        if self.samples is not None:
            self.samples.take()
            zeros = stats.by_name(stats.zero_share) if stats is not None else {}
            self.moving = [p.grad is not None and zeros.get(name) != 1 for name, p in self.samples.named]

    def measure_step(self) -> None:
        """Measure how far the step went, if the weights were sampled before it. Waits for nothing."""
        ratios = self.samples.ratios() if self.samples is not None else None
        if ratios is not None:
            self.ratios = ratios

    def drop_weights(self) -> None:
        """Drop the samples, because the step will not be taken."""
        if self.samples is not None:
            self.samples.drop()

    def state(self) -> dict[str, Any]:
        return {
            "losses": self.losses.state(),
            "all_norms": self.all_norms.state(),
            "clipping": self.unclipped_norms.state(),
            "trend": self.stage.state(),
            "steps": self.steps,
            "ratios": None if self.ratios is None else self.ratios.cpu(),
            "moving": list(self.moving),
            "farthest": self.farthest,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state; those of older versions have no "trend"."""
        self.losses.load(state["losses"])
        self.all_norms.load(state["all_norms"])
        self.unclipped_norms.load(state["clipping"])
        if "trend" in state:
            self.stage.load(state["trend"])
        self.steps = int(state.get("steps", state.get("taken_steps", 0)))
        self.ratios, self.moving = state["ratios"], list(state["moving"])
        farthest = state.get("farthest")
        self.farthest = None if farthest is None else (float(farthest[0]), str(farthest[1]))
