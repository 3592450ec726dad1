"""Losses, gradient norms and weights of one optimizer's steps, against which the next one is judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.callbacks.health.history.history import History, RecentValues
from lightning_aigc.callbacks.health.history.loss_history import LossHistory
from lightning_aigc.callbacks.health.parameter_names import lora_part
from lightning_aigc.callbacks.health.parameter_stats import Named, ParameterStats, Sampler
from lightning_aigc.callbacks.health.thresholds import HealthThresholds
from lightning_aigc.callbacks.health.training_stage import StageTracker
from lightning_aigc.sharding.local_parts import local_parts


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
        self.without_gradient: Named = []
        """Parameters without one at any step since the last look."""
        self._loaded: list[str] | None = None
        self.samples: WeightSamples | None = None
        self.ratios: Tensor | None = None
        """Relative change of each weight by the last step, still on the device."""
        self.moving: list[bool] = []
        """Whether each sampled weight had a gradient at that step, where it was sampled."""
        self.farthest: tuple[float, str] | None = None
        """Ratio and name of the weight that a step moved too far, as long as the loss has not come back since."""

    def attach(self, named: Named) -> None:
        """Sample the parameters as they are when training starts, or when more of them are trained."""
        self.named = named
        self.samples = WeightSamples(named) if named else None
        if self.ratios is not None and (self.samples is None or len(self.ratios) != len(self.samples.named)):
            self.ratios, self.moving = None, []
        loaded, self._loaded = self._loaded, None
        self.without_gradient = [(n, p) for n, p in named if loaded is None or n in loaded]

    def trainable(self) -> Named:
        """The parameters that are trainable now, which may change while training."""
        return [(name, p) for name, p in self.named if p.requires_grad]

    def note_gradients(self) -> None:
        """Note which parameters have a gradient. After the first step since a look few are left to ask."""
        self.without_gradient = [(name, p) for name, p in self.without_gradient if p.grad is None]

    def begin_interval(self) -> None:
        """Forget which parameters had a gradient, after a look."""
        self.without_gradient = self.named

    def take_weights(self, stats: ParameterStats | None) -> None:
        """Sample the weights before a step, to measure how far it moves them.

        Args: stats: the step's; a weight whose sampled gradient is all zero, such as a kernel of which one tap has one,
            is not expected to move where it is sampled. Nor is a sharded weight of which this rank has no entry.
        """
        if self.samples is not None:
            self.samples.take()
            zeros = stats.by_name(stats.zero_share) if stats is not None else {}
            parts = local_parts([p for _, p in self.samples.named])
            self.moving = [
                p.grad is not None and p.requires_grad and zeros.get(name) != 1 and part.numel() > 0
                for (name, p), part in zip(self.samples.named, parts, strict=True)
            ]

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
            "without_gradient": [name for name, _ in self.without_gradient],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state; those of older versions have no "trend" and no "without_gradient"."""
        self.losses.load(state["losses"])
        self.all_norms.load(state["all_norms"])
        self.unclipped_norms.load(state["clipping"])
        if "trend" in state:
            self.stage.load(state["trend"])
        self._loaded = state.get("without_gradient")
        self.steps = int(state.get("steps", state.get("taken_steps", 0)))
        self.ratios, self.moving = state["ratios"], list(state["moving"])
        farthest = state.get("farthest")
        self.farthest = None if farthest is None else (float(farthest[0]), str(farthest[1]))


SMALLEST_SHARE = 0.1
"""Share of the usual size of a new weight, 1 / sqrt(inputs), below which a weight's own size says nothing."""


class WeightSamples:
    """Entries of every matrix before a step, and how far the step moved them.

    Vectors (biases, norms' affine) start at zero or one and say little. Weights that start at zero, such as a LoRA's B,
    have no ratio: their first step is infinitely large against them. One that starts near zero, such as a class token,
    is measured by the usual size of a weight with its inputs.
    """

    def __init__(self, named: Named) -> None:
        self.named = [(name, p) for name, p in named if p.dim() > 1 and _is_telling(name)]
        # Without a matrix, vectors are sampled: they still show whether they move.
        self.named = self.named or list(named)
        self._sampler = Sampler([p for _, p in self.named])
        self._is_from_zero = (self._sampler.rows() == 0).all(dim=1)
        inputs = [max(1, p.numel() // max(1, p.shape[0])) if p.dim() > 1 else 1 for _, p in self.named]
        smallest = [SMALLEST_SHARE * (self._sampler.count / n) ** 0.5 if n > 1 else 0.0 for n in inputs]
        self._smallest = torch.tensor(smallest)
        self._before: Tensor | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Sample the weights now."""
        self._before = self._sampler.rows()

    def drop(self) -> None:
        """Drop the samples."""
        self._before = None

    @torch.no_grad()
    def ratios(self) -> Tensor | None:
        """Norm of the change over norm of the weight, on the device; None if none were taken. Waits for nothing."""
        before, self._before = self._before, None
        if before is None:
            return None
        change_P = torch.linalg.vector_norm(self._sampler.rows() - before, dim=1)
        size_P = torch.linalg.vector_norm(before, dim=1).clamp(min=1e-20)
        ratio_P: Tensor = change_P / torch.maximum(size_P, self._smallest.to(size_P.device))
        return ratio_P.masked_fill(self._is_from_zero.to(ratio_P.device) & (ratio_P > 0), float("nan"))


def _is_telling(name: str) -> bool:
    part = lora_part(name)
    return part is None or part[1] == "A"
