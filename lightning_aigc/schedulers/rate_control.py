"""What the learning rate should be, decided from two numbers a step: a search at the start, cuts and recovery after.

The search starts far below the configured rate and raises it step by step, as a learning-rate range test does (Smith,
arXiv:1506.01186). A range test watches the loss, which is too noisy to judge ten steps by. This one watches the cosine
between the step just taken and the descent direction found after it: as long as the rate is small both point the same
way; where a step carries past the minimum along its own direction they turn against each other (the sign that
hypergradient descent follows, Baydin et al., arXiv:1703.04782). The search ends shortly before, and keeps that rate.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_aigc.errors import ConfigError
from lightning_aigc.schedulers.step_measure import LastStep

# Calibrated on the tiny fine-tune of benchmarks/adaptive_lr.py, at rates 1 and 30 times the configured one.
SEARCH_START = 0.03
"""Of the configured rate."""
SEARCH_GROWTH = 1.35
"""A step."""
SMOOTHING = 0.7
"""Of the agreement, from step to step."""
ENOUGH_AGREEMENT = 0.1
"""Of the best agreement seen: below that the search ends."""
LARGEST_SHARE = 0.1
"""Of all trained weights, changed in one step; a healthy step changes less than a hundredth."""
MEDIAN_STEPS, FEWEST_STEPS = 100, 10
LOWEST_CUT = 1 / 64


class Change(NamedTuple):
    """One decision: the rate from `step` on is `factor` times the schedule's, for `reason`."""

    step: int
    factor: float
    reason: str


@dataclass(frozen=True)
class RateSettings:
    """How the rate follows the gradients."""

    search: bool = True
    """Find the rate in the first steps, from a thirtieth of the configured one up to `max_raise` times it."""
    grad_norm_threshold: float | None = 4.0
    """A global gradient norm above it cuts the rate; None never cuts."""
    relative: bool = True
    """Whether the threshold counts in running medians of the norm, or is a norm itself."""
    recovery_factor: float = 0.5
    """What a cut multiplies the rate by."""
    recovery_steps: int = 50
    """Steps to come back from one cut."""
    max_raise: float = 30.0
    """How far above the configured rate the search may go."""

    def __post_init__(self) -> None:
        threshold = self.grad_norm_threshold
        for name, value, is_fine, wanted in (
            ("grad_norm_threshold", threshold, threshold is None or threshold > 0, "a number above 0, or null"),
            ("recovery_factor", self.recovery_factor, 0 < self.recovery_factor < 1, "a number between 0 and 1"),
            ("recovery_steps", self.recovery_steps, self.recovery_steps >= 1, "at least 1"),
            ("max_raise", self.max_raise, self.max_raise > SEARCH_START, "a number such as 30"),
        ):
            if not is_fine:
                raise ConfigError(f"{name} must be {wanted}; got {value}")


class RateControl:
    """Takes one look at each optimizer step and says by what to multiply the rate."""

    def __init__(self, settings: RateSettings) -> None:
        self.settings = settings
        self.is_searching = settings.search
        self.top = SEARCH_START if settings.search else 1.0
        """Where the factor comes back to after cuts; while searching, the multiple of the configured rate."""
        self.factor = self.top
        self._agreement = self._best_agreement = 0.0
        self._looks = 0
        self._is_peak = False
        self._norms: deque[float] = deque(maxlen=MEDIAN_STEPS)

    def look(self, norm: float, last_step: LastStep | None) -> str | None:
        """Take in one step before it is made.

        Args: norm: the global gradient norm; one that is not finite is left to those who skip such steps.
            last_step: None where no step was made.
        Returns: why the rate changed, if it did by more than a step of the search or of the recovery.
        """
        if not math.isfinite(norm):
            return None
        limit = self._limit()
        reason = self._search(last_step) if self.is_searching else None
        was_peak, self._is_peak = self._is_peak, limit is not None and norm > limit
        if limit is not None and self._is_peak:
            reason = self._cut(norm, limit, was_peak)
        elif not self.is_searching and self.factor < self.top:
            grown = self.factor * (1 / self.settings.recovery_factor) ** (1 / self.settings.recovery_steps)
            self.factor = min(self.top, grown)
            if self.factor == self.top:
                reason = "the gradient norm stayed calm; the rate has recovered"
        self._norms.append(norm)
        return reason

    def _limit(self) -> float | None:
        threshold = self.settings.grad_norm_threshold
        if threshold is None or not self.settings.relative:
            return threshold
        return threshold * statistics.median(self._norms) if len(self._norms) >= FEWEST_STEPS else None

    def _search(self, last_step: LastStep | None) -> str | None:
        if last_step is None or not math.isfinite(last_step.agreement):
            return None
        self._looks += 1
        self._agreement = SMOOTHING * self._agreement + (1 - SMOOTHING) * last_step.agreement
        smooth = self._agreement / (1 - SMOOTHING**self._looks)
        if self._looks >= 2:
            self._best_agreement = max(self._best_agreement, smooth)
        if self._best_agreement == 0.0:  # too high from the first step on, or too early to say
            if self._looks >= 4:
                self.top = self.factor = self.top * self.settings.recovery_factor
            return None
        if last_step.share > LARGEST_SHARE:
            self.is_searching = False
            self.top = self.factor = self.top * self.settings.recovery_factor
            return f"the search ends: one step changed the trained weights by {last_step.share:.0%} of their size"
        if self._looks >= 4 and smooth < ENOUGH_AGREEMENT * self._best_agreement:
            self.is_searching = False
            return (
                "the search ends: agreement of each step with the next gradient fell from "
                f"{self._best_agreement:.3f} to {smooth:.3f}"
            )
        self.top = self.factor = self.top * SEARCH_GROWTH
        if self.top >= self.settings.max_raise:
            self.is_searching = False
            self.top = self.factor = self.settings.max_raise
            return "the search ends at max_raise, with no sign that the rate is too high"
        return None

    def _cut(self, norm: float, limit: float, was_peak: bool) -> str:
        if not was_peak:  # on the way back, the level that met the next peak is too high to come back to
            self.top = self.factor
        self.is_searching = False
        self.factor = max(self.factor * self.settings.recovery_factor, self.top * LOWEST_CUT)
        told = f"{self.settings.grad_norm_threshold:g} times its median" if self.settings.relative else "the threshold"
        return f"the gradient norm {norm:.3g} is above {limit:.3g}, {told}"

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and a list of them."""
        return {
            "is_searching": self.is_searching,
            "top": self.top,
            "factor": self.factor,
            "agreement": [self._agreement, self._best_agreement, self._looks],
            "is_peak": self._is_peak,
            "norms": list(self._norms),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_searching, self.top, self.factor = state["is_searching"], state["top"], state["factor"]
        self._agreement, self._best_agreement, looks = state["agreement"]
        self._looks, self._is_peak = int(looks), state["is_peak"]
        self._norms = deque(state["norms"], maxlen=MEDIAN_STEPS)
