"""Multiply one optimizer's learning rates for the length of each step, by what its gradients allow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_aigc.errors import ConfigError
from lightning_aigc.schedulers.rate_control import Change, RateControl, RateSettings
from lightning_aigc.schedulers.step_statistics import StepStatistics
from lightning_aigc.sharding.full_state import shard_like


def sets_own_rate(optimizer: Optimizer) -> bool:
    """Whether the optimizer finds its own rate, or weighs its average by rates: a search for one makes no sense."""
    return any("d" in group or "train_mode" in group for group in optimizer.param_groups)


def check_optimizer(optimizer: Optimizer, settings: RateSettings) -> None:
    """Raises: ConfigError for an optimizer whose rate must not be changed, or cannot be searched."""
    name = type(optimizer).__name__
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(f"{name} has no parameter that requires a gradient; there is nothing to adapt a rate for")
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "LBFGS takes several evaluations a step and searches its own step length; leave AdaptiveLR out"
        )
    if settings.search and sets_own_rate(optimizer):
        does = "finds its own rate" if any("d" in g for g in optimizer.param_groups) else "weighs its average by rates"
        raise ConfigError(
            f"{name} {does}, so a search for one makes no sense; set AdaptiveLR's search: false to keep the cuts at "
            "peaks of the gradient norm, or leave AdaptiveLR out"
        )


@dataclass(frozen=True)
class HeldRate:
    """The factor on an optimizer's learning rates, and who holds it there."""

    owner: str
    """The class that multiplies them."""
    factor: float
    top: float
    """Factor after the recovery from a cut."""
    found: float
    """Result of the search; more than `top` only after the loss has diverged."""
    is_searched: bool
    """Whether a search set it: another configured rate would lead to the same product."""
    is_searching: bool
    configured: float
    """The highest rate that the schedule began with."""
    scheduled: float
    """The highest rate that the schedule gives now."""

    @classmethod
    def by(cls, owner: str, rate: AdaptiveRate) -> HeldRate:
        control, scheduled = rate.control, rate.scheduled_rates()
        groups = zip(rate.optimizer.param_groups, scheduled, strict=True)
        return cls(
            owner,
            control.factor,
            control.top,
            control.found,
            control.settings.search,
            control.is_searching,
            configured=max(float(group.get("initial_lr", now)) for group, now in groups),
            scheduled=max(scheduled),
        )


class AdaptiveRate:
    """Multiplies the rates of an optimizer's groups for the length of a step.

    A scheduler never sees the product, so that a recursive schedule does not compound it. Nothing else may write the
    rates between `apply` and the optimizer's step.
    """

    def __init__(self, optimizer: Optimizer, settings: RateSettings) -> None:
        check_optimizer(optimizer, settings)
        self.optimizer = optimizer
        self.control = RateControl(settings)
        self.statistics = StepStatistics()
        self.steps = 0
        self._scheduled: list[float] | None = None
        self._hook = optimizer.register_step_post_hook(lambda *_: self.restore())

    def apply(
        self, reduce: Callable[[Tensor], Tensor] | None = None, loss: Tensor | float | None = None
    ) -> Change | None:
        """Read the gradients and set the rates of the coming step. Returns: the change to report, if any."""
        self.restore()
        self.steps += 1
        norm, last_step, loss_now = self.statistics(self.optimizer, self.control.is_searching, reduce, loss)
        reason = self.control.update(norm, last_step, loss_now)
        if not self.control.is_searching:
            self.statistics.weights = []
        if math.isfinite(norm):  # else the step may be skipped, and no hook would restore the rates
            self._scheduled = [float(group["lr"]) for group in self.optimizer.param_groups]
            for group, scheduled in zip(self.optimizer.param_groups, self._scheduled, strict=True):
                _set_rate(group, self.rate(group, scheduled))
        return None if reason is None else Change(self.steps, self.control.factor, reason)

    def rate(self, group: dict[str, Any], scheduled: float) -> float:
        """The group's rate; a search multiplies the configured rate, because it replaces the warm-up."""
        configured = float(group.get("initial_lr", scheduled)) if self.control.is_searching else scheduled
        return configured * self.control.factor

    def scheduled_rates(self) -> list[float]:
        """The groups' rates without the factor."""
        return self._scheduled or [float(group["lr"]) for group in self.optimizer.param_groups]

    def restore(self) -> None:
        """Set the groups' rates back to the schedule's, if `apply` changed them."""
        if self._scheduled is None:
            return
        for group, scheduled in zip(self.optimizer.param_groups, self._scheduled, strict=True):
            _set_rate(group, scheduled)
        self._scheduled = None

    def close(self) -> None:
        """Restore the rates and remove the hook."""
        self.restore()
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        # A sharded weight stays where the strategy can gather it.
        weights = [w.clone() if isinstance(w, DTensor) else w.cpu().clone() for w in self.statistics.weights]
        return {"steps": self.steps, "control": self.control.state_dict(), "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.control.load_state_dict(state["control"])
        self.statistics.weights = []
        if state["weights"]:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
            pairs = zip(state["weights"], parameters, strict=True)
            self.statistics.weights = [shard_like(weight.to(p.device, p.dtype), p) for weight, p in pairs]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
