"""Finds a learning rate in the first steps: raised while steps agree with the gradient after them, until they do not.

A learning-rate range test (Smith, arXiv:1506.01186) watches the loss, which is too noisy to judge ten steps by. This
watches the cosine between the step just taken and the descent direction found after it: as long as the rate is small
both point the same way; where a step carries past the minimum along its own direction they turn against each other
(the sign that hypergradient descent follows, Baydin et al., arXiv:1703.04782). Past that rate the cosine stays a
little below zero, while noise scatters it around a plateau before; so the rate waits at a step that disagrees, and the
search ends when the last steps differ from those before by more than both scatter.

The configured rate is the prior. It takes evidence to go above it or to end below it; where there is none, it is kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from lightning_aigc.schedulers.step_measure import LastStep

# Chosen on traces of the tiny fine-tune at the config's rate (batches of 1 and 4, and all weights with batches of 4;
# seeds 0 to 2), and on the regression of tests/schedulers/test_aigc_lr_scheduler.py.
SEARCH_START = 0.01
"""Of the configured rate: twelve steps that agree lead to the configured one, and six to one ten times too high."""
SEARCH_GROWTH = 1.5
"""After a step that agreed."""
LAST_STEPS = 6
"""That are compared with all before."""
FEWEST_BEFORE = 3
ENOUGH_T = 3.5
"""Welch's t between both, to end below the configured rate; and of all from zero, to go above it."""
ENOUGH_AGREEMENT = 0.1
"""Of the mean before: at or above the configured rate the search ends where the last steps agree less."""
LEAST_DEVIATION = 0.01
"""Of an agreement: that of steps without noise counts as this."""
KEPT_SHARE = 0.7
"""A rate found between this and 1 times the configured one is the configured one: no search tells them apart."""
LARGEST_SHARE = 0.2
"""Of all trained weights, changed in one step; a healthy step changes less than a hundredth."""
MAX_WAIT = 15
"""Steps at the configured rate, for evidence to go above it."""
RESTART, MAX_RESTARTS = 0.1, 3
"""Where the first steps already are too large or disagree, the search starts again from so much of where it was."""
MAX_STEPS = 60


class RateSearch:
    """One search; `rate` is the multiple of the configured rate for the coming step, and at the end the one found."""

    def __init__(self, max_raise: float) -> None:
        self.max_raise = max_raise
        self.rate = min(SEARCH_START, max_raise)
        self.ended_for: str | None = None
        self._agreements: list[float] = []
        self._restarts = self._waited = self._steps = 0

    def look(self, last_step: LastStep | None) -> None:
        """Take in what the last step said, None where none was made; sets the rate of the coming one."""
        self._steps += 1
        if self._steps >= MAX_STEPS:  # where steps disagreed, the rate has waited
            has_seen_any = bool(self._agreements) or self._restarts > 0
            return self._end(self.rate if has_seen_any else 1.0, f"{MAX_STEPS} steps gave no clear sign")
        if last_step is None or not math.isfinite(last_step.agreement):
            return None
        if last_step.share > LARGEST_SHARE:
            if len(self._agreements) < FEWEST_BEFORE and self._restarts < MAX_RESTARTS:
                return self._restart()
            reason = f"one step changed the trained weights by {last_step.share:.0%} of their size"
            return self._end(0.5 * self.rate, reason)
        self._agreements.append(last_step.agreement)
        if (turned := self._turned()) is not None:
            kept = 1.0 if KEPT_SHARE <= self.rate < 1.0 else self.rate
            said = " (so near to the configured rate, that one is kept)" if kept != self.rate else ""
            return self._end(kept, turned + said)
        if self._disagreed_from_the_start():
            if self._restarts == MAX_RESTARTS:
                return self._end(1.0, "steps and gradients disagree at any rate, which says nothing about it")
            return self._restart()
        if self.rate >= 1.0:
            before, last = self._agreements[:-LAST_STEPS], self._agreements[-LAST_STEPS:]
            if len(before) >= FEWEST_BEFORE and statistics.fmean(last) < ENOUGH_AGREEMENT * statistics.fmean(before):
                return self._end(self.rate, _fell(before, last))
            if self.rate == 1.0 and not self._agree():
                self._waited += 1
                if self._waited > MAX_WAIT:
                    self._end(1.0, "steps agree with gradients too little to tell; the configured rate is kept")
                return None
        if last_step.agreement > 0:
            grown = self.rate * SEARCH_GROWTH
            self.rate = 1.0 if self.rate < 1.0 < grown else grown  # which evidence is waited for
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
        return len(self._agreements) >= FEWEST_BEFORE and _welch_t(self._agreements, [0.0, 0.0]) > ENOUGH_T

    def _turned(self) -> str | None:
        """What says that the steps since any one disagree, and those before it did not."""
        for split in range(FEWEST_BEFORE, len(self._agreements) - LAST_STEPS + 1):
            before, since = self._agreements[:split], self._agreements[split:]
            if statistics.fmean(since) < 0 and _welch_t(before, since) > ENOUGH_T:
                return _fell(before, since)
        return None

    def _disagreed_from_the_start(self) -> bool:
        return (
            len(self._agreements) >= FEWEST_BEFORE + LAST_STEPS
            and statistics.fmean(self._agreements) < 0
            and _welch_t([0.0, 0.0], self._agreements) > ENOUGH_T
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
    """How many standard errors one mean lies above the other."""
    errors = [max(statistics.stdev(values), LEAST_DEVIATION) ** 2 / len(values) for values in (high, low)]
    return (statistics.fmean(high) - statistics.fmean(low)) / math.sqrt(sum(errors))


def _fell(before: Sequence[float], last: Sequence[float]) -> str:
    fell = f"fell from {statistics.fmean(before):.3f} to {statistics.fmean(last):.3f}"
    return f"agreement of each step with the next gradient {fell}"
