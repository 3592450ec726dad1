"""Outliers of a run, judged by its own spread: peaks of the gradient norm, and a loss that diverges."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

HISTORY_STEPS, MIN_STEPS = 100, 10
SCALED_DEVIATION = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""
MIN_SPREAD = 0.25
"""Smallest deviation of a log norm: a run that hardly varies has no peaks below e^(0.25 z) times its median."""
USUAL_Z = 6.0
"""Deviations from which a norm is a peak, where the threshold is a norm and below the run's median."""
LOSS_STEPS, LOSS_Z = 20, 4.0
"""Divergence: the median of the last LOSS_STEPS losses exceeds the median of the first ones by LOSS_Z deviations."""
MIN_RISE = 0.5
"""Share of the first losses' median that it must also rise by."""


def median_and_deviation(values: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """Median and robust standard deviation."""
    middle = statistics.median(values)
    return middle, max(least, SCALED_DEVIATION * statistics.median(abs(value - middle) for value in values))


class PeakDetector:
    """Says when a gradient norm is a peak.

    With `relative` the threshold is a z of the log norm among the last 100. Else it is a norm; in a run whose median
    norm is above the threshold, a peak must also be an outlier of the run.
    """

    def __init__(self, threshold: float | None, relative: bool) -> None:
        self.threshold, self.relative = threshold, relative
        self._logs: deque[float] = deque(maxlen=HISTORY_STEPS)

    def update(self, norm: float, *, is_search_over: bool = True) -> str | None:
        """Why this norm is a peak, or None. During a search only an outlier of the run is a peak."""
        limit = self._limit(is_search_over)
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

    def _limit(self, is_search_over: bool) -> float | None:
        own, is_normal_below = None, True
        if len(self._logs) >= MIN_STEPS:
            middle, deviation = median_and_deviation(self._logs, MIN_SPREAD)
            own = math.exp(min(middle + self._z * deviation, 700.0))  # exp(710) is infinite
            is_normal_below = self.threshold is None or middle <= math.log(self.threshold)
        if self.threshold is None or self.relative:
            return None if self.threshold is None else own
        if is_normal_below and is_search_over:
            return self.threshold
        return None if own is None else max(self.threshold, own)

    def state_dict(self) -> dict[str, Any]:
        return {"logs": list(self._logs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._logs = deque(state["logs"], maxlen=HISTORY_STEPS)


class DivergenceDetector:
    """Says when the last losses lie above the first ones by more than the spread of the first."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LOSS_STEPS)

    def update(self, loss: float) -> bool:
        """Add a loss. Returns: whether the run diverges; a loss that is not finite counts for nothing."""
        if not math.isfinite(loss):
            return False
        if len(self._first) < LOSS_STEPS:
            self._first.append(loss)
            return False
        self._last.append(loss)
        if len(self._last) < LOSS_STEPS:
            return False
        middle, deviation = median_and_deviation(self._first)
        return statistics.median(self._last) > middle + max(LOSS_Z * deviation, MIN_RISE * abs(middle))

    def restart(self) -> None:
        """Compare with the last losses from here on: only a loss that rises further diverges."""
        self._first, self._last = list(self._last), deque(maxlen=LOSS_STEPS)

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self._first), "last": list(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first, self._last = list(state["first"]), deque(state["last"], maxlen=LOSS_STEPS)
