"""The recent values of one number, and how far a new value lies from them."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

SCALED_DEVIATION = 1.4826
"""A median absolute deviation times this is the standard deviation of a normal distribution."""
SMALLEST_SPREAD = 0.1
"""In logarithms: with a smaller one, a tenth more than a history that hardly varies would look like a spike."""

MEDIAN_SPREAD = math.sqrt(math.pi / 2)
"""Standard deviation of a median over that of a mean of as many normal values."""


class RecentValues:
    """The last finite values."""

    def __init__(self, length: int) -> None:
        self.values: deque[float] = deque(maxlen=length)

    def add(self, value: float) -> None:
        """Add a value if it is finite."""
        if math.isfinite(value):
            self.values.append(value)

    def state(self) -> list[float]:
        return list(self.values)

    def load(self, values: Iterable[float]) -> None:
        self.values.clear()
        self.values.extend(values)


class History:
    """The last values of a positive number, compared by their logarithms.

    Args:
        length: Values to remember.
        shortest: Values before which nothing is unusual.
    """

    def __init__(self, length: int, shortest: int) -> None:
        self.shortest = shortest
        self._logs: deque[float] = deque(maxlen=length)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._logs)

    def add(self, value: float) -> None:
        """Add a value if it is finite and above zero."""
        if math.isfinite(value) and value > 0:
            if len(self._logs) == self._logs.maxlen:
                del self._sorted[bisect.bisect_left(self._sorted, self._logs[0])]
            log = math.log(value)
            self._logs.append(log)
            bisect.insort(self._sorted, log)

    def oldest(self) -> float:
        """The first value that is still kept; NaN before one."""
        return math.exp(self._logs[0]) if self._logs else math.nan

    def median(self) -> float:
        return math.exp(self._middle()) if self._logs else math.nan

    def _middle(self) -> float:
        half = len(self._sorted) // 2
        return self._sorted[half] if len(self._sorted) % 2 else (self._sorted[half - 1] + self._sorted[half]) / 2

    def z(self, value: float) -> float:
        """Robust standard deviations of a value above the median; 0 while the history is short."""
        if len(self._logs) < self.shortest or not math.isfinite(value) or value <= 0:
            return 0.0
        middle = self._middle()
        spread = SCALED_DEVIATION * statistics.median(abs(log - middle) for log in self._logs)
        return (math.log(value) - middle) / max(spread, SMALLEST_SPREAD)

    def is_spike(self, value: float, z: float, ratio: float) -> bool:
        """Whether a value is both `z` deviations above the median and `ratio` times it."""
        return value > ratio * self.median() and self.z(value) > z  # the ratio costs next to nothing

    def has_shifted(self, value: float, z: float, ratio: float, counts: Sequence[int]) -> bool:
        """Whether the median of the last values, this one among them, is as far off as a spike must be.

        The median of many varies less than a single value, so a shift shows where a spike is lost in the spread; the
        wider the spread, the more values it takes. They are compared with the values before them.

        Args:
            counts: Numbers of last values that are tried, the smallest first.
        """
        if not self._logs or not math.isfinite(value) or value <= 0:
            return False
        last = [math.log(value), *itertools.islice(reversed(self._logs), counts[-1] - 1)]
        # Costs next to nothing, and is seldom true.
        if not statistics.median(last[: counts[0]]) > self._middle() + math.log(ratio) / 2:
            return False
        return any(self._is_off(last[:count], z, ratio) for count in counts if len(self._logs) >= self.shortest + count)

    def _is_off(self, last: Sequence[float], z: float, ratio: float) -> bool:
        before = list(itertools.islice(self._logs, len(self._logs) - len(last) + 1))
        middle, now = statistics.median(before), statistics.median(last)
        spread = SCALED_DEVIATION * statistics.median(abs(log - middle) for log in before)
        far = (now - middle) / max(spread, SMALLEST_SPREAD)
        return now > middle + math.log(ratio) and far * math.sqrt(len(last)) > z * MEDIAN_SPREAD

    def state(self) -> list[float]:
        return list(self._logs)

    def load(self, logs: Iterable[float]) -> None:
        self._logs.clear()
        self._logs.extend(logs)
        self._sorted = sorted(self._logs)
