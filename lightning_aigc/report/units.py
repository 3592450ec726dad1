"""Numbers as people read them: time, memory, bytes, scores with their noise."""

from __future__ import annotations

import math
from pathlib import Path

from lightning_aigc.report.record import RunRecord
from lightning_aigc.report.verdict import change

UNKNOWN = "-"
"""Text of a number that was not measured."""


def time_text(seconds: float) -> str:
    """`8.4 s`, `3 min 20 s`, `2 h 05 min`"""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def speed_text(steps: int, seconds: float) -> str:
    """`4.2 steps a second`, or seconds a step for slow ones."""
    if not steps or not seconds > 0:
        return UNKNOWN
    return f"{steps / seconds:.3g} steps/s" if steps >= seconds else f"{seconds / steps:.3g} s/step"


def memory_text(mib: float) -> str:
    """`7.42 GiB`"""
    return f"{mib / 1024:.2f} GiB"


def bytes_text(count: float) -> str:
    """`3.2 MB`"""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def score_text(record: RunRecord, name: str) -> str:
    """`0.32 → 0.78 ± 0.02`; `-` where it was not measured."""
    found = change(record.scores.get(name))
    return UNKNOWN if found is None else found.numbers()


def rate_text(value: float) -> str:
    return f"{value:.2e}" if math.isfinite(value) else UNKNOWN


def name_of(folder: Path) -> str:
    """Name of a run: its folder's name."""
    return folder.resolve().name
