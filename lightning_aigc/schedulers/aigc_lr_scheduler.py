"""AIGCLRScheduler: warm-up, decay, a rate that follows the gradients, and a score to stop at; for plain torch loops."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_aigc.errors import ConfigError
from lightning_aigc.schedulers.adaptive_rate import AdaptiveRate, HeldRate
from lightning_aigc.schedulers.convergence import ConvergenceMonitor
from lightning_aigc.schedulers.rate_control import Change, RateSettings


class AIGCLRScheduler(LRScheduler):
    """A schedule that finds its own learning rate and lowers it at peaks of the gradient norm.

    A search in the first 10 to 60 steps finds the rate, as in `callbacks.AdaptiveLR`, and replaces the warm-up.
    `optimizer.step()` reads the gradients, so clip before it, and the threshold applies to the clipped norm. A `loss`
    among the metrics of `step` is watched too: where it diverges, the rate that was found is lowered.

    Args:
        optimizer: any but LBFGS.
        base_lr: the rate of every group, or a list with each group's; None keeps the groups' own.
        warmup_steps: steps of linear warm-up, without a search.
        adaptive_mode: whether the rate follows the gradients; without, there are warm-up and decay only.
        grad_norm_threshold: a global gradient norm above it cuts the rate. In a run whose median norm is above it, the
            norm must also be an outlier of that run.
        recovery_factor: what a cut multiplies the rate by; it recovers in 50 steps, without another cut until then.
        total_steps: optimizer steps to the end of the decay; None never decays.
        decay: cosine or linear to zero, or constant.
        search: whether to search for the rate.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        >>> scheduler = AIGCLRScheduler(optimizer, base_lr=1e-2, warmup_steps=5, total_steps=100)
        >>> scheduler.enable_convergence_monitor(metric="clip_similarity", patience=20)
        >>> for step in range(100):
        ...     loss = layer(torch.ones(8, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()  # reads the gradients, then steps
        ...     scheduler.step(metrics={"clip_similarity": -loss.item()} if step % 10 == 9 else None)
        ...     optimizer.zero_grad()
        ...     if scheduler.should_stop_early():
        ...         break
        >>> scheduler.restore_best()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: float | Sequence[float] | None = None,
        warmup_steps: int = 100,
        adaptive_mode: bool = True,
        grad_norm_threshold: float = 1.5,
        recovery_factor: float = 0.5,
        total_steps: int | None = None,
        decay: Literal["cosine", "linear", "constant"] = "cosine",
        search: bool = True,
        last_epoch: int = -1,
    ) -> None:
        groups = optimizer.param_groups
        rates = list(base_lr) if isinstance(base_lr, Sequence) else [base_lr] * len(groups)
        if len(rates) != len(groups) or any(r is not None and not 0 < r < math.inf for r in rates):
            raise ConfigError(f"base_lr must be a rate above 0, or one for each of {len(groups)} groups; got {base_lr}")
        if warmup_steps < 0 or (total_steps is not None and total_steps <= warmup_steps):
            raise ConfigError(
                f"wanted 0 <= warmup_steps < total_steps, got warmup_steps={warmup_steps}, total_steps={total_steps}"
            )
        if decay not in ("cosine", "linear", "constant"):
            raise ConfigError(f"decay must be cosine, linear or constant, got {decay!r}")
        self.warmup_steps, self.total_steps, self.decay = warmup_steps, total_steps, decay
        self.changes: list[Change] = []
        self._adaptive: AdaptiveRate | None = None
        self._monitor: ConvergenceMonitor | None = None
        self._loss = math.nan
        self._is_searched = adaptive_mode and search
        if adaptive_mode:
            settings = RateSettings(search, grad_norm_threshold, relative=False, recovery_factor=recovery_factor)
            self._adaptive = AdaptiveRate(optimizer, settings)
        if last_epoch == -1:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = group["lr"] if rate is None else rate
                group.pop("initial_lr", None)
        super().__init__(optimizer, last_epoch)
        if self._adaptive is not None:
            optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        assert self._adaptive is not None
        change = self._adaptive.apply(loss=self._loss)
        self._loss = math.nan
        if change is not None:
            self.changes.append(change)

    def get_lr(self) -> list[Any]:
        """The scheduled rates, without the factor."""
        if self.total_steps is not None and self.decay != "constant" and self.last_epoch == self.total_steps + 1:
            warnings.warn(
                f"AIGCLRScheduler: the training goes beyond total_steps={self.total_steps}, where the rate is 0; give"
                " all steps of the training as total_steps",
                stacklevel=3,
            )
        return [base * self._schedule_factor(self.last_epoch) for base in self.base_lrs]

    def _schedule_factor(self, step: int) -> float:
        if not self._is_searched and step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.total_steps is None or self.decay == "constant":
            return 1.0
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        done = min(1.0, max(0.0, done))
        return 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    @property
    def factor(self) -> float:
        """Multiplier of the scheduled rates."""
        return 1.0 if self._adaptive is None else self._adaptive.control.factor

    def held(self) -> HeldRate | None:
        """The factor on the rate and its reason; None without `adaptive_mode`."""
        return None if self._adaptive is None else HeldRate.by("AIGCLRScheduler", self._adaptive)

    def step(self, epoch: int | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Advance the schedule by an optimizer step.

        Args: metrics: scores that were measured at this step.
        """
        super().step(epoch)
        if metrics is not None:
            metrics = {name: value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        if metrics is not None and "loss" in metrics:
            self._loss = float(metrics["loss"])
        if self._monitor is not None:
            if metrics is not None and (set(metrics) != {"loss"} or self._monitor.metric == "loss"):
                self._monitor.update(metrics, self.last_epoch, self._parameters())
            self._monitor.warn_if_missing(self.last_epoch)

    # Stopping at the best score

    def enable_convergence_monitor(
        self,
        metric: str = "clip_similarity",
        patience: int = 200,
        save_best: bool = True,
        mode: Literal["max", "min"] = "max",
        min_delta: float = 0.0,
    ) -> None:
        """Watch a score among the metrics of `step`, and keep the weights that reached the best."""
        self._monitor = ConvergenceMonitor(metric, patience, save_best, mode, min_delta)

    @property
    def best_metric(self) -> float | None:
        """The best score so far; None before the first, or without a monitor."""
        return None if self._monitor is None else self._monitor.best

    def should_stop_early(self) -> bool:
        """Whether no score has beaten the best for `patience` steps. Raises: ConfigError without a monitor."""
        return self._monitor_or_raise().should_stop()

    def restore_best(self) -> None:
        """Copy the best weights back into the model. Raises: ConfigError if there are none."""
        self._monitor_or_raise().restore(self._parameters())

    def _monitor_or_raise(self) -> ConvergenceMonitor:
        if self._monitor is None:
            raise ConfigError('no score is followed; call enable_convergence_monitor(metric="clip_similarity") first')
        return self._monitor

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    # State: numbers, strings and tensors, loadable with weights_only=True

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "base_lrs": [float(rate) for rate in self.base_lrs],
            "last_lr": [float(rate) for rate in self._last_lr],
            "changes": [list(change) for change in self.changes],
            "loss": self._loss,
            "adaptive": None if self._adaptive is None else self._adaptive.state_dict(),
            "monitor": None if self._monitor is None else self._monitor.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]
        self.base_lrs, self._last_lr = list(state_dict["base_lrs"]), list(state_dict["last_lr"])
        self.changes = [Change(int(step), factor, reason) for step, factor, reason in state_dict["changes"]]
        self._loss = state_dict.get("loss", math.nan)  # older states do not have it
        if self._adaptive is not None and state_dict["adaptive"] is not None:
            self._adaptive.load_state_dict(state_dict["adaptive"])
        if state_dict["monitor"] is not None:
            self._monitor = ConvergenceMonitor.from_state(state_dict["monitor"])
