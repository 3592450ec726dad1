"""Search for a learning rate in the first steps: raise it while each step agrees with the gradient after it.

A learning-rate range test (Smith, arXiv:1506.01186) watches the loss, which is too noisy to judge ten steps by. This
watches the cosine between a step and the descent direction after it, the agreement: while the rate is small both point
the same way; where a step overshoots the minimum along its own direction they turn against each other (the sign that
hypergradient descent follows, Baydin et al., arXiv:1703.04782). Past that rate the cosine stays a little below zero,
while noise scatters it around a plateau before; so the rate waits at a step that disagrees, and the search ends when
the last steps differ from those before by more than the scatter of both.

The configured rate is the prior: ending above or below it takes evidence, and without any it is kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from lightning_aigc.schedulers.step_statistics import LastStep

# Chosen on traces of the tiny fine-tune at the config's rate (batches of 1 and 4, and all weights with batches of 4;
# seeds 0 to 2), and on the regression of tests/schedulers/test_aigc_lr_scheduler.py.
SEARCH_START = 0.01
"""Share of the configured rate; twelve steps that agree lead to the configured rate, six to a tenth of it."""
SEARCH_GROWTH = 1.5
"""Factor on the rate after a step that agrees."""
LAST_STEPS = 6
"""Last steps that are compared with all before."""
MIN_BEFORE = 3
T_THRESHOLD = 3.5
"""Welch's t between both to end below the configured rate, and of all against zero to go above it."""
MIN_AGREEMENT = 0.1
"""Share of the mean before; at or above the configured rate the search ends where the last steps agree less."""
MIN_DEVIATION = 0.01
"""Smallest standard deviation of an agreement, for steps without noise."""
KEPT_SHARE = 0.7
"""A search that ends between this and 1 times the configured rate keeps that rate: it cannot tell them apart."""
MAX_UPDATE_RATIO = 0.2
"""Norm of a step over that of all trained weights that is too large; a healthy step has less than a hundredth."""
MAX_WAIT = 15
"""Steps at the configured rate to wait for evidence to go above it."""
RESTART, MAX_RESTARTS = 0.1, 3
"""Factor on the rate where the first steps are too large or disagree already, and the search starts again."""
MAX_STEPS = 60


class RateSearch:
    """A search; `rate` is the coming step's multiple of the configured rate, and at the end the result."""

    def __init__(self, max_raise: float) -> None:
        self.max_raise = max_raise
        self.rate = min(SEARCH_START, max_raise)
        self.ended_for: str | None = None
        self._agreements: list[float] = []
        self._restarts = self._waited = self._steps = 0

    def update(self, last_step: LastStep | None) -> None:
        """Judge the last step, None if there was none, and set the coming step's rate."""
        self._steps += 1
        if self._steps >= MAX_STEPS:  # the rate has waited at steps that disagreed
            has_seen_any = bool(self._agreements) or self._restarts > 0
            return self._end(self.rate if has_seen_any else 1.0, f"{MAX_STEPS} steps gave no clear sign")
        if last_step is None or not math.isfinite(last_step.agreement):
            return None
        if last_step.update_ratio > MAX_UPDATE_RATIO:
            if len(self._agreements) < MIN_BEFORE and self._restarts < MAX_RESTARTS:
                return self._restart()
            reason = f"one step changed the trained weights by {last_step.update_ratio:.0%} of their size"
            return self._end(0.5 * self.rate, reason)
        self._agreements.append(last_step.agreement)
        if (overshoot := self._overshoot()) is not None:
            kept = 1.0 if KEPT_SHARE <= self.rate < 1.0 else self.rate
            said = " (so near to the configured rate, that one is kept)" if kept != self.rate else ""
            return self._end(kept, overshoot + said)
        if self._disagreed_from_the_start():
            if self._restarts == MAX_RESTARTS:
                return self._end(1.0, "steps and gradients disagree at any rate, which says nothing about it")
            return self._restart()
        if self.rate >= 1.0:
            before, last = self._agreements[:-LAST_STEPS], self._agreements[-LAST_STEPS:]
            if len(before) >= MIN_BEFORE and statistics.fmean(last) < MIN_AGREEMENT * statistics.fmean(before):
                return self._end(self.rate, _fell(before, last))
            if self.rate == 1.0 and not self._agree():
                self._waited += 1
                if self._waited > MAX_WAIT:
                    self._end(1.0, "steps agree with gradients too little to tell; the configured rate is kept")
                return None
        if last_step.agreement > 0:
            grown = self.rate * SEARCH_GROWTH
            self.rate = 1.0 if self.rate < 1.0 < grown else grown  # stop at 1 and wait for evidence
        if self.rate >= self.max_raise:
            return self._end(self.max_raise, "max_raise is reached, with no sign that the rate is too high")
        return None

    def _restart(self) -> None:
        self._restarts += 1
        self._agreements = []
        self.rate *= RESTART

    def end_below(self, reason: str) -> None:
        """End at half the rate."""
        self._end(0.5 * self.rate, reason)

    def _end(self, rate: float, reason: str) -> None:
        self.rate, self.ended_for = min(rate, self.max_raise), reason

    def _agree(self) -> bool:
        return len(self._agreements) >= MIN_BEFORE and _welch_t(self._agreements, [0.0, 0.0]) > T_THRESHOLD

    def _overshoot(self) -> str | None:
        """The evidence that steps disagree from some step on and agreed before it, or None."""
        for split in range(MIN_BEFORE, len(self._agreements) - LAST_STEPS + 1):
            before, since = self._agreements[:split], self._agreements[split:]
            if statistics.fmean(since) < 0 and _welch_t(before, since) > T_THRESHOLD:
                return _fell(before, since)
        return None

    def _disagreed_from_the_start(self) -> bool:
        return (
            len(self._agreements) >= MIN_BEFORE + LAST_STEPS
            and statistics.fmean(self._agreements) < 0
            and _welch_t([0.0, 0.0], self._agreements) > T_THRESHOLD
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "agreements": list(self._agreements),
            "counts": [self._restarts, self._waited, self._steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate, self._agreements = state["rate"], list(state["agreements"])
        self._restarts, self._waited, self._steps = (int(count) for count in state["counts"])


def _welch_t(high: Sequence[float], low: Sequence[float]) -> float:
    """Difference of two means in standard errors."""
    errors = [max(statistics.stdev(values), MIN_DEVIATION) ** 2 / len(values) for values in (high, low)]
    return (statistics.fmean(high) - statistics.fmean(low)) / math.sqrt(sum(errors))


def _fell(before: Sequence[float], last: Sequence[float]) -> str:
    fell = f"fell from {statistics.fmean(before):.3f} to {statistics.fmean(last):.3f}"
    return f"agreement of each step with the next gradient {fell}"
