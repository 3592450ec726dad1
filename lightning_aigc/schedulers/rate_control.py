"""Decide the factor on the learning rate: a search at first, then cuts at peaks, from which it always recovers.

`RateSearch` finds the rate in the first steps; `PeakDetector` finds outliers of the gradient norm, `DivergenceDetector`
a loss that diverges. A peak multiplies the rate by `recovery_factor`, at most once in `recovery_steps`: without a
diverging loss the factor stays within [recovery_factor, 1] times the rate found, and returns to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_aigc.errors import ConfigError
from lightning_aigc.schedulers.detectors import DivergenceDetector, PeakDetector
from lightning_aigc.schedulers.rate_search import SEARCH_START, RateSearch
from lightning_aigc.schedulers.step_statistics import LastStep

LOWEST_SHARE = 1 / 64
"""Share of the rate found below which a diverging loss does not lower it."""


class Change(NamedTuple):
    """One decision: the rate from `step` on is `factor` times the schedule's, for `reason`."""

    step: int
    factor: float
    reason: str


@dataclass(frozen=True)
class RateSettings:
    """Options of the control of the rate by the gradients."""

    search: bool = True
    """Find the rate in the first steps, from a hundredth of the configured one up to `max_raise` times it."""
    grad_norm_threshold: float | None = 6.0
    """A global gradient norm above it cuts the rate; None never cuts."""
    relative: bool = True
    """Whether the threshold is a robust z of the log norm, or a norm itself."""
    recovery_factor: float = 0.5
    """Multiplier of the rate at a cut."""
    recovery_steps: int = 50
    """Steps to come back from a cut; until then there is no other."""
    max_raise: float = 30.0
    """Largest multiple of the configured rate that the search tries."""

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
    """Decides at each optimizer step by what factor to multiply the rate."""

    def __init__(self, settings: RateSettings) -> None:
        self.settings = settings
        self.search: RateSearch | None = RateSearch(settings.max_raise) if settings.search else None
        self.found = self.top = 1.0 if self.search is None else self.search.rate
        """The factor that the search found, and what diverging losses have left of it, to which a cut recovers."""
        self.factor = self.top
        self._peaks = PeakDetector(settings.grad_norm_threshold, settings.relative)
        self._divergence = DivergenceDetector()
        self._steps_since_lowered = settings.recovery_steps

    @property
    def is_searching(self) -> bool:
        """Whether the factor multiplies the configured rate; after the search, the scheduled rate."""
        return self.search is not None

    def update(self, norm: float, last_step: LastStep | None, loss: float = math.nan) -> str | None:
        """Decide the factor of the coming step.

        Args: norm: the global gradient norm; a norm that is not finite changes nothing, because its step is skipped.
            last_step: None where no step was made.
            loss: the step's loss; NaN where it is not known, and then no cut goes below `recovery_factor`.
        Returns: why the factor changed, if by more than a step of the search or of the recovery.
        """
        if not math.isfinite(norm):
            return None
        self._steps_since_lowered += 1
        peak = self._peaks.update(norm, is_search_over=self.search is None)
        has_diverged = self._divergence.update(loss)
        if self.search is not None:
            return self._search_on(self.search, last_step, peak, has_diverged)
        if has_diverged and self._steps_since_lowered >= self.settings.recovery_steps:
            return self._lower()
        if self.factor < self.top:
            return self._recover()
        if peak is not None:
            self.factor = self.top * self.settings.recovery_factor
        return peak

    def heed(self, harm: str) -> str | None:
        """Take back half of what the search raised, down to the configured rate.

        Args: harm: a sign that the model gets worse, which gradients do not show.
        Returns: why the factor changed; None where there is nothing to take back, or it was lowered just now.
        """
        if self.top <= 1 or self._steps_since_lowered < self.settings.recovery_steps:
            return None
        self._steps_since_lowered = 0
        if self.search is not None:
            self.search.end_below(harm)
            self.found, self.search = max(1.0, self.search.rate), None
            self.top = self.factor = self.found
        else:
            self.top = max(1.0, self.top * self.settings.recovery_factor)
            self.factor = min(self.factor, self.top)
        return f"the raised rate does harm: {harm}"

    def _search_on(
        self, search: RateSearch, last_step: LastStep | None, peak: str | None, has_diverged: bool
    ) -> str | None:
        if has_diverged:
            search.end_below("the loss diverges")
        elif peak is None:
            search.update(last_step)
        self.found = self.top = self.factor = search.rate
        if search.ended_for is not None:
            self.search = None
            return f"the search ends: {search.ended_for}"
        if peak is not None:  # one odd batch says nothing about the rate: take a smaller step and search on
            self.factor = self.top * self.settings.recovery_factor
        return None

    def _lower(self) -> str:
        self._steps_since_lowered = 0
        self._divergence.restart()
        self.top = max(self.top * self.settings.recovery_factor, self.found * LOWEST_SHARE)
        self.factor = min(self.factor, self.top)
        return "the loss has risen out of its own spread, above where it began: the run diverges"

    def _recover(self) -> str | None:
        grown = self.factor * (1 / self.settings.recovery_factor) ** (1 / self.settings.recovery_steps)
        if grown < self.top * (1 - 1e-9):
            self.factor = grown
            return None
        self.factor = self.top
        return "the rate has recovered"

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and lists of them."""
        return {
            "search": None if self.search is None else self.search.state_dict(),
            "found": self.found,
            "top": self.top,
            "factor": self.factor,
            "steps_since_lowered": self._steps_since_lowered,
            "peaks": self._peaks.state_dict(),
            "divergence": self._divergence.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "peaks" not in state:
            state = _upgrade_state(state)
        self.search = None
        if state["search"] is not None:
            self.search = RateSearch(self.settings.max_raise)
            self.search.load_state_dict(state["search"])
        self.found, self.top, self.factor = state["found"], state["top"], state["factor"]
        self._steps_since_lowered = int(state["steps_since_lowered"])
        self._peaks.load_state_dict(state["peaks"])
        self._divergence.load_state_dict(state["divergence"])


def _upgrade_state(state: dict[str, Any]) -> dict[str, Any]:
    """Convert a state from before peaks were outliers: it keeps its rate, and a search continues from there."""
    search = {"rate": state["top"], "agreements": [], "counts": [0, 0, 0]} if state["is_searching"] else None
    return {
        "search": search,
        "found": state["top"],
        "top": state["top"],
        "factor": state["factor"],
        "steps_since_lowered": 0,
        "peaks": {"logs": [math.log(norm) for norm in state["norms"] if norm > 0]},
        "divergence": {"first": [], "last": []},
    }
