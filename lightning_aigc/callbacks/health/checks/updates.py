"""Checks of the change of the weights by a step: too large, tiny, or zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

from lightning_aigc.callbacks.health.alerts.alerts import Finding, Policy
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.step_reading import StepReading
from lightning_aigc.callbacks.health.thresholds import HealthThresholds

USUAL_RATIO = 3e-3
"""Relative change of a matrix by one step of a healthy training."""
LEAST_RISE = 2.0
"""Loss over the first one below which no step was ruinous, however far it went."""


class UpdateCheck(Check):
    """Judges the step before this one, whose update is read from the device together with this step's numbers."""

    policies: ClassVar = {
        "update_ratio": Policy(confirm=2, escalate_after=10),
        "no_update": Policy(confirm=2, escalate_after=10),
    }
    runs_on_bad_steps: ClassVar = True

    def run(self, reading: StepReading) -> Findings | None:
        history = reading.history
        if reading.is_last_step_skipped:
            history.ratios = None
            return None
        ratios = reading.numbers.get("ratios")
        if ratios is None or history.samples is None:
            return None
        history.ratios = None
        names = [name for name, _ in history.samples.named]
        moving = history.moving or [True] * len(names)
        if history.stage.at(reading.loss).is_fitted:  # an optimizer that has found the minimum stands still
            moving = [False] * len(names)
        found = check_updates(names, ratios, moving, reading.limits, reading.remedies)
        farthest = max(
            (
                (ratio, name)
                for name, ratio, moves in zip(names, ratios, moving, strict=True)
                if moves and ratio > reading.limits.update_ratio_high
            ),
            default=None,
        )
        rise = history.stage.rise
        if history.farthest is not None and rise > _ruinous_rise(history.farthest[0], reading.limits):
            # The weights have grown with the steps, so that the next ones look small relative to them.
            found = [each for each in found if each.level not in ("warning", "error") or each.check != "update_ratio"]
            found.append(_ruinous(*history.farthest, rise, reading.remedies))
        else:
            history.farthest = farthest
        return Findings(found, self.policies, reading.layers_of(names), step=reading.step - 1)


def check_updates(
    names: Sequence[str],
    ratios: Sequence[float],
    has_gradient: Iterable[bool],
    limits: HealthThresholds,
    remedies: Remedies,
) -> list[Finding]:
    """Find weights that moved too far, and weights that did not move although they have a gradient."""
    findings, far = [], []
    has_slow = False
    for name, ratio, moves in zip(names, ratios, has_gradient, strict=True):
        if not math.isfinite(ratio) or not moves:
            continue
        if ratio == 0:
            findings.append(_unmoved(name, remedies))
        elif ratio > limits.update_ratio_high:
            far.append((ratio, name))
        elif ratio < limits.update_ratio_low and not has_slow:
            has_slow = True
            findings.append(
                Finding(
                    "update_ratio",
                    name,
                    "info",
                    f"a step changes it by {ratio:.1g} of its size",
                    "a learning rate that is too low",
                    remedies.learning_rate(10),
                )
            )
    if far:
        ratio, name = max(far)
        others = f", and {len(far) - 1} more weights too far" if len(far) > 1 else ""
        findings.append(
            Finding(
                "update_ratio",
                name,
                "error" if ratio > 1 else "warning",
                f"one step changes it by {ratio:.2g} of its size{others}",
                "a learning rate that is too high",
                remedies.learning_rate(float(f"{USUAL_RATIO / ratio:.1g}")),
            )
        )
    return findings


def _ruinous_rise(ratio: float, limits: HealthThresholds) -> float:
    """The loss over the first one from which a step of this ratio ruined the training: less for a farther step."""
    return max(LEAST_RISE, limits.loss_ratio * limits.update_ratio_high / ratio)


def _ruinous(ratio: float, name: str, rise: float, remedies: Remedies) -> Finding:
    return Finding(
        "update_ratio",
        name,
        "error",
        f"one step changed it by {ratio:.2g} of its size, and the loss is {rise:.2g} times the first one since",
        "a learning rate that is too high",
        remedies.learning_rate(float(f"{USUAL_RATIO / ratio:.1g}")),
    )


def _unmoved(name: str, remedies: Remedies) -> Finding:
    is_half = "true" in remedies.precision and not remedies.precision.startswith(("32", "64"))
    return Finding(
        "no_update",
        name,
        "warning",
        "it has a gradient, and the step did not change it",
        "half-precision weights round the step away"
        if is_half
        else "a learning rate of zero, or no optimizer holds it",
        remedies.mixed_precision() if is_half else remedies.learning_rate(10),
    )
