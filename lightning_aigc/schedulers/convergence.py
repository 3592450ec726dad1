"""Watch a score: the best so far, the weights that reached it, and when to stop waiting for a better score."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_aigc.errors import ConfigError


class ConvergenceMonitor:
    """Watches a metric that the training loop measures from time to time."""

    def __init__(
        self,
        metric: str,
        patience: int,
        save_best: bool,
        mode: Literal["max", "min"] = "max",
        min_delta: float = 0.0,
    ) -> None:
        if patience < 1 or min_delta < 0 or mode not in ("max", "min"):
            raise ConfigError(
                "the convergence monitor wants patience of at least 1, min_delta of at least 0 and mode max or min; "
                f"got patience={patience}, min_delta={min_delta}, mode={mode!r}"
            )
        self.metric, self.patience, self.save_best = metric, patience, save_best
        self.mode, self.min_delta = mode, min_delta
        self.best: float | None = None
        self.best_step = 0
        self.best_weights: list[Tensor] = []
        """The trained parameters at the best score, on the CPU, in the optimizer's order."""
        self.last_step = 0
        self._said_missing = False

    def update(self, metrics: Mapping[str, Any], step: int, parameters: Iterable[nn.Parameter]) -> None:
        """Add the scores of a step. Raises: ConfigError if the watched metric is not among them."""
        if self.metric not in metrics:
            raise ConfigError(
                f"got metrics {', '.join(sorted(metrics)) or '(none)'}; wanted {self.metric}: name it in "
                "enable_convergence_monitor(metric=...), or hand it to step(metrics=...)"
            )
        score = float(metrics[self.metric])
        self.last_step = step
        if not math.isfinite(score):
            warnings.warn(
                f"{self.metric} is {score} at step {step} and does not count; the training has most likely diverged: "
                "lower the learning rate, or restore_best()",
                stacklevel=3,
            )
            return
        gain = math.inf if self.best is None else (score - self.best) * (1 if self.mode == "max" else -1)
        if gain > self.min_delta:
            self.best, self.best_step = score, step
            if self.save_best:
                self.best_weights = [p.detach().to("cpu", copy=True) for p in parameters]

    def warn_if_missing(self, step: int) -> None:
        """Warn once if no score has come in `patience` steps."""
        if not self._said_missing and self.last_step == 0 and self.best is None and step > self.patience:
            self._said_missing = True
            warnings.warn(
                f"no {self.metric} in {self.patience} steps; hand it to step(metrics={{{self.metric!r}: score}}), or "
                "nothing will stop this training or keep its best weights",
                stacklevel=3,
            )

    def should_stop(self) -> bool:
        """Whether the last score came `patience` steps or more after the best."""
        return self.best is not None and self.last_step - self.best_step >= self.patience

    @torch.no_grad()
    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the best weights back. Raises: ConfigError if none were kept."""
        if not self.best_weights:
            raise ConfigError(f"no best weights were kept; wanted save_best=True and at least one {self.metric}")
        for parameter, best in zip(parameters, self.best_weights, strict=True):
            parameter.copy_(best)

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": [self.metric, self.patience, self.save_best, self.mode, self.min_delta],
            "best": self.best,
            "best_step": self.best_step,
            "last_step": self.last_step,
            "best_weights": list(self.best_weights),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ConvergenceMonitor:
        monitor = cls(*state["settings"])
        monitor.best, monitor.best_step, monitor.last_step = state["best"], state["best_step"], state["last_step"]
        monitor.best_weights = list(state["best_weights"])
        return monitor
