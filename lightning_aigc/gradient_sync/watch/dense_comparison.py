"""DenseComparison: whether plain DDP would be as fast as averages every few steps, on the link of this run."""

from __future__ import annotations

import time

CHEAP_SHARE = 0.1
"""Share of a step below which a dense sync costs nothing that is worth a loss; backward hides some of it, too."""
TRIES = 3
"""Dense syncs that are timed; the fastest counts."""


class DenseComparison:
    """Times one dense sync, the run's steps up to the second average, and the averages; then it says what is faster."""

    def __init__(self, dense_s: float) -> None:
        self.dense_s = dense_s
        self._began: float | None = None
        self._is_done = False

    def note_average(self, began: float, steps: int) -> str:
        """Note an average after `steps` steps that has just ended. Returns: a sentence after the second one, or ''."""
        now = time.perf_counter()
        if self._is_done or self._began is None:
            self._began = now  # the first steps have compiled kernels, and filled caches
            return ""
        self._is_done = True
        return compare(self.dense_s, (began - self._began) / steps, (now - began) / steps)


def compare(dense_s: float, step_s: float, average_s: float) -> str:
    """Return a sentence if a dense sync of `dense_s` a step is as fast as averages of `average_s` a step, else ''."""
    if dense_s > max(average_s, CHEAP_SHARE * step_s):
        return ""
    return (
        f"plain DDP is as fast here: dense gradients would take {1e3 * dense_s:.1f} ms of a step of "
        f"{1e3 * step_s:.1f} ms, and backward hides most of that; averages take {1e3 * average_s:.1f} ms a step. Dense "
        "loses nothing: use strategy: ddp, and mode local between machines with a slow link"
    )
