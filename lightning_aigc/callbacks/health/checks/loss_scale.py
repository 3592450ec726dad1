"""Loss spikes, the loss scale, and the steps that its scaler skips."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, ClassVar

from lightning_aigc.callbacks.health.alerts.alerts import Finding, Level, Policy
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.history.loss_history import LossSpike
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.step_reading import StepReading

SKIP_WINDOW = 20
"""Steps among which the skipped ones are counted."""


class LossScaleCheck(Check):
    """Counts the steps that a loss scaler skips, and watches its scale."""

    policies: ClassVar = {"loss_scale": Policy()}
    state_key: ClassVar = "loss_scale"
    runs_on_bad_steps: ClassVar = True

    def __init__(self) -> None:
        self._skips: deque[bool] = deque(maxlen=SKIP_WINDOW)
        self.skipped = 0
        """Steps skipped so far."""

    def run(self, reading: StepReading) -> Findings | None:
        scale, limits = reading.scale, reading.limits
        if scale is None:
            return None
        # A probe of a large model's gradients may miss the overflow; a scale that fell does not.
        is_skipped = not math.isfinite(reading.norm) if reading.is_every_norm_exact else reading.is_last_step_skipped
        self._skips.append(is_skipped)
        self.skipped += is_skipped
        skips = sum(self._skips)
        level: Level
        if scale < limits.loss_scale_low:
            said, level = f"the loss scale fell to {scale:.2g}", "error"
        elif skips >= limits.skipped_steps:
            said = f"{skips} of the last {len(self._skips)} steps were skipped, and the loss scale is {scale:g}"
            level = "warning"
        else:
            return Findings([], self.policies)
        cause = "values beyond float16's range, which no loss scale brings back"
        finding = Finding("loss_scale", "all", level, said, cause, reading.remedies.safe_precision())
        return Findings([finding], self.policies)

    def state(self) -> dict[str, Any]:
        return {"skips": list(self._skips), "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        self._skips = deque(state["skips"], maxlen=SKIP_WINDOW)
        self.skipped = int(state["skipped"])


class LossCheck(Check):
    """Adds a step's losses to their history, and judges them by it."""

    policies: ClassVar = {"loss_spike": Policy(confirm=2)}

    def run(self, reading: StepReading) -> Findings | None:
        losses, timesteps = [reading.loss], None
        if "losses" in reading.numbers:
            losses, timesteps = reading.numbers["losses"], [int(t) for t in reading.numbers["timesteps"]]
        elif not math.isfinite(reading.loss):
            return None
        spikes, layers = reading.history.losses.add(losses, timesteps, is_fitted=reading.stage.is_fitted)
        return Findings([finding_of(spike, reading.remedies) for spike in spikes], self.policies, layers)


def finding_of(spike: LossSpike, remedies: Remedies) -> Finding:
    """The finding for a loss spike."""
    return Finding(
        "loss_spike",
        spike.layer,
        "warning",
        f"the loss is {spike.loss:.3g}, {spike.loss / spike.median:.1f} times its median there",
        "images unlike the others in these batches, or a learning rate that is too high",
        remedies.learning_rate(0.5),
    )
