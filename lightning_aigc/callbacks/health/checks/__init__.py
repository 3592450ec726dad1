"""The checks, a file each. To add one, write its class and add it to STEP_CHECKS."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_aigc.callbacks.health.alerts.alerts import CheckName, Policy
from lightning_aigc.callbacks.health.checks.clipping import ClippingCheck
from lightning_aigc.callbacks.health.checks.frozen import NOT_IN_OPTIMIZER, FrozenCheck
from lightning_aigc.callbacks.health.checks.gradients import GradientCheck
from lightning_aigc.callbacks.health.checks.interface import Check
from lightning_aigc.callbacks.health.checks.lora import LoRACheck
from lightning_aigc.callbacks.health.checks.loss_scale import LossCheck, LossScaleCheck
from lightning_aigc.callbacks.health.checks.non_finite import NON_FINITE
from lightning_aigc.callbacks.health.checks.ranks import RANK_DIVERGENCE
from lightning_aigc.callbacks.health.checks.updates import UpdateCheck

STEP_CHECKS: tuple[type[Check], ...] = (
    LossScaleCheck,
    UpdateCheck,
    LossCheck,
    LoRACheck,
    GradientCheck,
    FrozenCheck,
    ClippingCheck,
)
"""In the order in which they run, and in which a step's alerts come."""

OTHER_CHECKS: Mapping[CheckName, Policy] = {NON_FINITE: Policy(), NOT_IN_OPTIMIZER: Policy(), RANK_DIVERGENCE: Policy()}
"""Findings of functions that run at other times: at a step that is not finite, before training, as a collective."""

POLICIES: Mapping[CheckName, Policy] = {
    name: policy
    for policies in (*(check.policies for check in STEP_CHECKS), OTHER_CHECKS)
    for name, policy in policies.items()
}
RATE_TOO_HIGH: Collection[CheckName] = ("update_ratio", "lora_delta", "exploding", "loss_spike")
"""Checks whose warnings want a lower learning rate; while one stands, no remedy raises it."""
CHECK_NAMES: tuple[CheckName, ...] = tuple(POLICIES)
"""Every name that an alert may have; docs/health.md describes each."""
