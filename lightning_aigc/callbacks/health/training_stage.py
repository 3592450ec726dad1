"""TrainingStage: progress of a training. A model that has learned its data has small gradients, which is no fault."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST_LOSSES, LAST_LOSSES, FIRST_LOOKS = 10, 10, 3
LEARNED = 0.9
"""Share of the first loss below which the loss has fallen."""
FITTED = 0.01
"""Share of the first loss below which the model is fitted: a jump there is small relative to the first loss."""
SMALL_SHARE = 0.1
"""Share of their first norm from which the gradients of a falling loss count as small."""
STEEPEST = 0.01
"""Share of its last value that the norm of all gradients keeps from look to look while a model is being fitted, apart
from the loss's own fall."""


@dataclass(frozen=True)
class TrainingStage:
    """References for a step's numbers; the defaults are those of a start, where nothing has been learned."""

    first_loss: float = 0.0
    gradient_fall: float = 1.0
    """Norm of all gradients over their first norm, where it came down together with the loss; else 1."""
    is_fitted: bool = False
    has_learned: bool = False
    """The loss lies clearly below the first ones."""


class StageTracker:
    """The first and last losses, and the norm of all gradients at the looks."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LAST_LOSSES)
        self._first_norms: list[float] = []
        self._level = math.nan  # the last norm that was reached gradually
        self._level_loss = math.nan  # the loss there

    def add_loss(self, loss: float) -> None:
        """Add a step's loss."""
        if math.isfinite(loss):
            self._last.append(loss)
            if len(self._first) < FIRST_LOSSES:
                self._first.append(loss)

    def add_norm(self, norm: float) -> None:
        """Add the norm of all gradients at a look."""
        if not math.isfinite(norm):
            return
        if len(self._first_norms) < FIRST_LOOKS:
            self._first_norms.append(norm)
        loss = self._last[-1] if self._last else math.nan
        with_loss = min(1.0, loss / self._level_loss) if loss >= 0 and self._level_loss > 0 else 1.0
        # A fault takes gradients away from one look to the next, learning does so step by step or with the loss.
        if not norm < STEEPEST * self._level * with_loss:
            self._level, self._level_loss = norm, loss

    @property
    def has_learned(self) -> bool:
        """Whether the loss lies clearly below the first ones."""
        if len(self._first) < FIRST_LOSSES:
            return False
        first = statistics.median(self._first)
        return statistics.median(self._last) < first - (1 - LEARNED) * abs(first)

    @property
    def rise(self) -> float:
        """Median of the last losses over the very first one; 1 where that is not above zero."""
        return statistics.median(self._last) / self._first[0] if self._first and self._first[0] > 0 else 1.0

    def at(self, loss: float) -> TrainingStage:
        """Return the stage at a step with this loss."""
        first = statistics.median(self._first) if self._first else 0.0
        fall = 1.0
        if self.has_learned and self._first_norms:
            start = statistics.median(self._first_norms)
            fall = self._level / start if self._level < SMALL_SHARE * start else 1.0
        return TrainingStage(first, fall, first > 0 and 0 <= loss <= FITTED * first, self.has_learned)

    def state(self) -> dict[str, Any]:
        return {
            "first": list(self._first), "last": list(self._last), "first_norms": list(self._first_norms),
            "level": self._level, "level_loss": self._level_loss,
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        self._first, self._first_norms = list(state["first"]), list(state["first_norms"])
        self._last = deque(state["last"], maxlen=LAST_LOSSES)
        self._level, self._level_loss = float(state["level"]), float(state["level_loss"])
