"""A short memory of one number, and how far a new value is from it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

SCALED_DEVIATION = 1.4826
"""A median absolute deviation times this is the standard deviation of a normal distribution."""
SMALLEST_SPREAD = 0.1
"""Of a logarithm: a history that hardly varies must not make a tenth more look like a spike."""


class History:
    """The last values of a positive number, compared by their logarithms.

    Args:
        length: Values to remember.
        shortest: Values before which nothing is unusual.
    """

    def __init__(self, length: int, shortest: int) -> None:
        self.shortest = shortest
        self._logs: deque[float] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._logs)

    def add(self, value: float) -> None:
        """Remember a value; zero and what is not finite are left out."""
        if math.isfinite(value) and value > 0:
            self._logs.append(math.log(value))

    def median(self) -> float:
        return math.exp(statistics.median(self._logs)) if self._logs else math.nan

    def z(self, value: float) -> float:
        """How many robust standard deviations a value lies above the median; 0 while the history is short."""
        if len(self._logs) < self.shortest or not math.isfinite(value) or value <= 0:
            return 0.0
        middle = statistics.median(self._logs)
        spread = SCALED_DEVIATION * statistics.median(abs(log - middle) for log in self._logs)
        return (math.log(value) - middle) / max(spread, SMALLEST_SPREAD)

    def is_spike(self, value: float, z: float, ratio: float) -> bool:
        """Whether a value is both `z` deviations above the median and `ratio` times it."""
        return self.z(value) > z and value > ratio * self.median()

    def state(self) -> list[float]:
        return list(self._logs)

    def load(self, logs: Iterable[float]) -> None:
        self._logs.clear()
        self._logs.extend(logs)
