"""Points of the curves: thinned out, smoothed, and scores with their noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_aigc.report.paired_scores import Check, improvement
from lightning_aigc.report.record import Curve

MOST_POINTS = 600
"""Points of a line; beyond, each stands for several steps."""
SMOOTHED_STEPS = 20
METRICS = {
    "clip_t": "CLIP-T", "clip_i": "CLIP-I", "direction": "Edit: direction of the target", "kept": "Edit: what it keeps",
}  # fmt: skip


def smooth(values: Sequence[float], window: int = SMOOTHED_STEPS) -> list[float]:
    """The mean of the last `window` finite values; NaN before the first."""
    smoothed: list[float] = []
    recent: list[float] = []
    for value in values:
        if math.isfinite(value):
            recent = [*recent, value][-window:]
        smoothed.append(sum(recent) / len(recent) if recent else math.nan)
    return smoothed


def thin(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """At most `most` points, each the mean of the finite values of as many steps, at the last of them."""
    stride = -(-len(curve.steps) // most)
    if stride <= 1:
        return curve
    starts = range(0, len(curve.steps), stride)
    means = []
    for start in starts:
        part = curve.values[start : start + stride]
        finite = [value for value in part if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if len(finite) == len(part) else math.nan)
    return Curve([curve.steps[min(start + stride, len(curve.steps)) - 1] for start in starts], means)


def rows(curve: Curve, **more: Any) -> list[dict[str, Any]]:
    """A chart's rows; those that are not finite are left out, because JSON has none."""
    pairs = zip(curve.steps, curve.values, strict=True)
    return [{"step": step, "value": float(f"{value:.5g}"), **more} for step, value in pairs if math.isfinite(value)]


def score_rows(checks: Sequence[Check], metric: str, **more: Any) -> list[dict[str, Any]]:
    """A score by step, with the standard error of its difference to the first check, image by image."""
    found = []
    for check in checks:
        now, first = check.scores(metric), checks[0].scores(metric)
        if not now or not all(math.isfinite(score) for score in now):
            continue
        mean, noise = check.mean(metric), 0.0
        if check is not checks[0] and len(now) == len(first) and all(math.isfinite(score) for score in first):
            noise = improvement(now, first)[1]
        row = {"step": check.step, "value": mean, "noise": noise, "low": mean - noise, "high": mean + noise}
        found.append({key: round(value, 5) for key, value in row.items()} | more)
    return found
