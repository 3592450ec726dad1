"""What the learning rate should be, decided from three numbers a step: the rate found, and cuts that always end.

`RateSearch` finds the rate in the first steps; `PeakDetector` says when a gradient norm stands out of the run's own
spread; `DivergenceDetector` says when the loss does. A peak costs `recovery_factor` once in `recovery_steps`, so that
without a diverging loss the factor stays within [recovery_factor, 1] times the rate found, and comes back to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_aigc.errors import ConfigError
from lightning_aigc.schedulers.rate_search import SEARCH_START, RateSearch
from lightning_aigc.schedulers.run_spread import DivergenceDetector, PeakDetector
from lightning_aigc.schedulers.step_measure import LastStep

LOWEST_SHARE = 1 / 64
"""Of the rate found: what a loss that goes on diverging lowers it to at most."""


class Change(NamedTuple):
    """One decision: the rate from `step` on is `factor` times the schedule's, for `reason`."""

    step: int
    factor: float
    reason: str


@dataclass(frozen=True)
class RateSettings:
    """How the rate follows the gradients."""

    search: bool = True
    """Find the rate in the first steps, from a hundredth of the configured one up to `max_raise` times it."""
    grad_norm_threshold: float | None = 6.0
    """A global gradient norm above it cuts the rate; None never cuts."""
    relative: bool = True
    """Whether the threshold is a robust z of the log norm, or a norm itself."""
    recovery_factor: float = 0.5
    """What a cut multiplies the rate by."""
    recovery_steps: int = 50
    """Steps to come back from a cut; until then there is no other."""
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
        self.search: RateSearch | None = RateSearch(settings.max_raise) if settings.search else None
        self.found = self.top = 1.0 if self.search is None else self.search.rate
        """What the search found, and what of it a diverged loss has left: where the factor comes back to."""
        self.factor = self.top
        self._peaks = PeakDetector(settings.grad_norm_threshold, settings.relative)
        self._divergence = DivergenceDetector()
        self._steps_since_lowered = settings.recovery_steps

    @property
    def is_searching(self) -> bool:
        """Whether the factor multiplies the configured rate and not the scheduled one."""
        return self.search is not None

    def look(self, norm: float, last_step: LastStep | None, loss: float = math.nan) -> str | None:
        """Take in one step before it is made.

        Args: norm: the global gradient norm; one that is not finite is left to those who skip such steps.
            last_step: None where no step was made.
            loss: the step's loss; NaN where nobody knows it, and then no cut goes below `recovery_factor`.
        Returns: why the rate changed, if it did by more than a step of the search or of the recovery.
        """
        if not math.isfinite(norm):
            return None
        self._steps_since_lowered += 1
        peak = self._peaks.look(norm, is_rate_settled=self.search is None)
        has_diverged = self._divergence.look(loss)
        if self.search is not None:
            return self._go_on_searching(self.search, last_step, peak, has_diverged)
        if has_diverged and self._steps_since_lowered >= self.settings.recovery_steps:
            return self._lower()
        if self.factor < self.top:
            return self._recover()
        if peak is not None:
            self.factor = self.top * self.settings.recovery_factor
        return peak

    def _go_on_searching(
        self, search: RateSearch, last_step: LastStep | None, peak: str | None, has_diverged: bool
    ) -> str | None:
        if has_diverged:
            search.end_below("the loss diverges")
        elif peak is None:
            search.look(last_step)
        self.found = self.top = self.factor = search.rate
        if search.ended_for is not None:
            self.search = None
            return f"the search ends: {search.ended_for}"
        if peak is not None:  # one odd batch says nothing about a rate: a smaller step, and the search goes on
            self.factor = self.top * self.settings.recovery_factor
        return None

    def _lower(self) -> str:
        self._steps_since_lowered = 0
        self._divergence.begin_again()
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
            state = _of_older_form(state)
        self.search = None
        if state["search"] is not None:
            self.search = RateSearch(self.settings.max_raise)
            self.search.load_state_dict(state["search"])
        self.found, self.top, self.factor = state["found"], state["top"], state["factor"]
        self._steps_since_lowered = int(state["steps_since_lowered"])
        self._peaks.load_state_dict(state["peaks"])
        self._divergence.load_state_dict(state["divergence"])


def _of_older_form(state: dict[str, Any]) -> dict[str, Any]:
    """A state from before peaks were judged by spread goes on at the rate it had come to, or searches on from there."""
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
