"""Loss spikes: a loss far above its own history, for diffusion within its bucket of timesteps."""

from __future__ import annotations

import math
from typing import ClassVar

from lightning_aigc.callbacks.health.alerts.alerts import Finding, Policy
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.history.loss_history import LossSpike
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.step_reading import StepReading


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
