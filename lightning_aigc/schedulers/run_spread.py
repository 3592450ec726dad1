"""What is unusual for a run, judged by its own spread: peaks of the gradient norm, and a loss that diverges."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

HISTORY_STEPS, FEWEST_STEPS = 100, 10
NORMAL_DEVIATION = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""
LEAST_SPREAD = 0.25
"""Of the log norm: what a run varies by at least, so that a calm one has no peaks below e^(0.25 z)."""
USUAL_Z = 6.0
"""Beyond it a norm is a peak where the threshold is a norm itself and below the run's normal."""
LOSS_STEPS, LOSS_Z = 20, 4.0
"""The median of so many losses, so many deviations above that of the first ones, has diverged."""
LEAST_RISE = 0.5
"""Of the first losses' median: what it has to rise by besides."""


def spread(values: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """Median and robust standard deviation."""
    middle = statistics.median(values)
    return middle, max(least, NORMAL_DEVIATION * statistics.median(abs(value - middle) for value in values))


class PeakDetector:
    """Says when a gradient norm is a peak.

    With `relative` the threshold is a z of the log norm among the last 100. Else it is a norm; but a run whose median
    is above it is not one long peak: there a peak has to stand out of the run's spread as well.
    """

    def __init__(self, threshold: float | None, relative: bool) -> None:
        self.threshold, self.relative = threshold, relative
        self._logs: deque[float] = deque(maxlen=HISTORY_STEPS)

    def look(self, norm: float, *, is_rate_settled: bool = True) -> str | None:
        """Why this norm is a peak, or None. While a rate is looked for, only what stands out of the run is one."""
        limit = self._limit(is_rate_settled)
        if norm > 0:
            self._logs.append(math.log(norm))
        if limit is None or norm <= limit:
            return None
        is_own = self.relative or limit != self.threshold
        what = f"{self._z:g} robust deviations above the run's median" if is_own else "the threshold"
        return f"the gradient norm {norm:.3g} is above {limit:.3g}, {what}"

    @property
    def _z(self) -> float:
        return self.threshold if self.relative and self.threshold is not None else USUAL_Z

    def _limit(self, is_rate_settled: bool) -> float | None:
        own, is_normal_below = None, True
        if len(self._logs) >= FEWEST_STEPS:
            middle, deviation = spread(self._logs, LEAST_SPREAD)
            own = math.exp(min(middle + self._z * deviation, 700.0))  # exp(710) is infinite
            is_normal_below = self.threshold is None or middle <= math.log(self.threshold)
        if self.threshold is None or self.relative:
            return None if self.threshold is None else own
        if is_normal_below and is_rate_settled:
            return self.threshold
        return None if own is None else max(self.threshold, own)

    def state_dict(self) -> dict[str, Any]:
        return {"logs": list(self._logs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._logs = deque(state["logs"], maxlen=HISTORY_STEPS)


class DivergenceDetector:
    """Says when the last losses stand above the first ones by more than these spread."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LOSS_STEPS)

    def look(self, loss: float) -> bool:
        """Take in a loss. Returns: whether the run diverges; losses that are not finite say nothing."""
        if not math.isfinite(loss):
            return False
        if len(self._first) < LOSS_STEPS:
            self._first.append(loss)
            return False
        self._last.append(loss)
        if len(self._last) < LOSS_STEPS:
            return False
        middle, deviation = spread(self._first)
        return statistics.median(self._last) > middle + max(LOSS_Z * deviation, LEAST_RISE * abs(middle))

    def begin_again(self) -> None:
        """From here on only a loss that goes on rising diverges."""
        self._first, self._last = list(self._last), deque(maxlen=LOSS_STEPS)

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self._first), "last": list(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first, self._last = list(state["first"]), deque(state["last"], maxlen=LOSS_STEPS)
