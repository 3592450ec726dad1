"""Checks of what happens to gradients on their way into the step: clipping and the loss scale."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from lightning_aigc.callbacks.health.alert import Finding
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.thresholds import HealthThresholds

SHORTEST_CLIPPED = 10
"""Norms before which the clipped share says nothing."""
SKIP_WINDOW = 20


class Clipping:
    """The share of steps whose gradients were longer than the clip value."""

    def __init__(self, length: int) -> None:
        self._norms: deque[float] = deque(maxlen=length)

    def add(self, norm: float) -> None:
        if math.isfinite(norm):
            self._norms.append(norm)

    def check(self, clip: float | None, limits: HealthThresholds, remedies: Remedies) -> list[Finding]:
        if not clip or len(self._norms) < SHORTEST_CLIPPED:
            return []
        share = sum(norm > clip for norm in self._norms) / len(self._norms)
        if share < limits.clip_share:
            return []
        median = statistics.median(self._norms)
        return [
            Finding(
                "clip_share",
                "all",
                "warning" if median > limits.clip_factor * clip else "info",
                f"{share:.0%} of the last {len(self._norms)} gradients were clipped; their median norm is {median:.2g}",
                "a clip value below what this model's gradients are, which makes every step equally long",
                remedies.clipping(2 * median),
            )
        ]

    def state(self) -> list[float]:
        return list(self._norms)

    def load(self, norms: list[float]) -> None:
        self._norms.clear()
        self._norms.extend(norms)


class LossScale:
    """The steps that a loss scaler skipped, seen from its scale."""

    def __init__(self) -> None:
        self._skips: deque[bool] = deque(maxlen=SKIP_WINDOW)
        self.skipped = 0
        """Steps skipped so far."""

    def check(self, scale: float, is_skipped: bool, limits: HealthThresholds, remedies: Remedies) -> list[Finding]:
        """Note this step; findings where the scale has collapsed."""
        self._skips.append(is_skipped)
        self.skipped += is_skipped
        skips = sum(self._skips)
        if scale < limits.loss_scale_low:
            said, level = f"the loss scale fell to {scale:.2g}", "error"
        elif skips >= limits.skipped_steps:
            said = f"{skips} of the last {len(self._skips)} steps were skipped, and the loss scale is {scale:g}"
            level = "warning"
        else:
            return []
        cause = "values beyond float16's range, which no loss scale brings back"
        return [Finding("loss_scale", "all", level, said, cause, remedies.safe_precision())]  # type: ignore[arg-type]

    def state(self) -> dict[str, Any]:
        return {"skips": list(self._skips), "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        self._skips = deque(state["skips"], maxlen=SKIP_WINDOW)
        self.skipped = int(state["skipped"])
