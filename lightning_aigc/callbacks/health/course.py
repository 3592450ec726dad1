"""What is remembered of one optimizer's steps; a training with two has two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_aigc.callbacks.health.history import History
from lightning_aigc.callbacks.health.loss import LossHistory
from lightning_aigc.callbacks.health.measurement import Named
from lightning_aigc.callbacks.health.scaling import Clipping
from lightning_aigc.callbacks.health.thresholds import HealthThresholds
from lightning_aigc.callbacks.health.trend import Trend
from lightning_aigc.callbacks.health.updates import WeightSamples


class Course:
    """The histories of one optimizer's losses and gradients, and the weights that it moves.

    Args:
        limits: The thresholds.
        number: Which optimizer it is; of the first the loss is called `loss`, of the second `loss.optimizer_1`.
    """

    def __init__(self, limits: HealthThresholds, number: int = 0) -> None:
        self.losses = LossHistory(limits, name=f"loss.optimizer_{number}" if number else "loss")
        self.all_norms = History(limits.history, limits.min_history)
        self.clipping = Clipping(limits.history)
        self.trend = Trend()
        self.steps = 0
        """Steps seen so far."""
        self.named: Named = []
        """The parameters that it looks at."""
        self.samples: WeightSamples | None = None
        self.ratios: Tensor | None = None
        self.moving: list[bool] = []

    def attach(self, named: Named) -> None:
        """Take the parameters as they are when training starts."""
        self.named = named
        self.samples = WeightSamples(named) if named else None

    def take_weights(self) -> None:
        """Remember the weights, to see how far the step that follows moves them."""
        if self.samples is not None:
            self.samples.take()
            self.moving = [p.grad is not None for _, p in self.samples.named]

    def measure_step(self) -> None:
        """Measure how far the step went, where the weights were taken before it. Waits for nothing."""
        ratios = self.samples.ratios() if self.samples is not None else None
        if ratios is not None:
            self.ratios = ratios

    def drop_weights(self) -> None:
        """Forget them: the step will not be taken."""
        if self.samples is not None:
            self.samples.drop()

    def state(self) -> dict[str, Any]:
        return {
            "losses": self.losses.state(),
            "all_norms": self.all_norms.state(),
            "clipping": self.clipping.state(),
            "trend": self.trend.state(),
            "steps": self.steps,
            "ratios": None if self.ratios is None else self.ratios.cpu(),
            "moving": list(self.moving),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take a state up; one from before trends were kept has none."""
        self.losses.load(state["losses"])
        self.all_norms.load(state["all_norms"])
        self.clipping.load(state["clipping"])
        if "trend" in state:
            self.trend.load(state["trend"])
        self.steps = int(state.get("steps", state.get("taken_steps", 0)))
        self.ratios, self.moving = state["ratios"], list(state["moving"])
