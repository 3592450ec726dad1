"""The share of steps whose gradients are clipped."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import ClassVar

from lightning_aigc.callbacks.health.alerts.alerts import Finding, Policy
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.step_reading import StepReading
from lightning_aigc.callbacks.health.thresholds import HealthThresholds

SHORTEST_CLIPPED = 10
"""Norms before which the clipped share says nothing."""


class ClippingCheck(Check):
    """Adds the norm of all gradients to its history, and compares the history with the clip value."""

    policies: ClassVar = {"clip_share": Policy()}

    def run(self, reading: StepReading) -> Findings | None:
        if not reading.is_norm_exact:
            return None
        norms = reading.history.unclipped_norms
        norms.add(reading.norm)
        found = check_clipping(norms.values, reading.clip, reading.limits, reading.remedies)
        return Findings(found, self.policies)


def check_clipping(
    norms: Sequence[float], clip: float | None, limits: HealthThresholds, remedies: Remedies
) -> list[Finding]:
    """Find a clip value below nearly all of the last norms."""
    if not clip or len(norms) < SHORTEST_CLIPPED:
        return []
    share = sum(norm > clip for norm in norms) / len(norms)
    if share < limits.clip_share:
        return []
    median = statistics.median(norms)
    return [
        Finding(
            "clip_share",
            "all",
            "warning" if median > limits.clip_factor * clip else "info",
            f"{share:.0%} of the last {len(norms)} gradients were clipped; their median norm is {median:.2g}",
            "a clip value below what this model's gradients are, which makes every step equally long",
            remedies.clipping(2 * median),
        )
    ]
