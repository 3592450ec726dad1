"""`check`: the checks for a plain torch loop, one look at gradients and weights without a history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from lightning_aigc.callbacks.health.alerts.alerts import Alert, Finding
from lightning_aigc.callbacks.health.checks.gradients import check_gradients
from lightning_aigc.callbacks.health.checks.lora import check_pairs
from lightning_aigc.callbacks.health.checks.non_finite import NON_FINITE, non_finite_gradients
from lightning_aigc.callbacks.health.parameter_names import trained
from lightning_aigc.callbacks.health.parameter_stats import measure
from lightning_aigc.callbacks.health.remedies import GENERAL
from lightning_aigc.callbacks.health.thresholds import HealthThresholds
from lightning_aigc.errors import ConfigError


def check(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    step: int = 0,
    thresholds: HealthThresholds | Mapping[str, Any] | None = None,
) -> list[Alert]:
    """Check gradients and weights once, between backward and the optimizer's step; waits for the device once.

    >>> import torch
    >>> layer = torch.nn.Linear(8, 8)
    >>> layer(torch.linspace(1, 2, 8)).sum().mul(1e-9).backward()
    >>> [(alert.check, alert.layer) for alert in check(layer.named_parameters())]
    [('vanishing', 'weight'), ('vanishing', 'bias')]

    Args:
        named_parameters: `model.named_parameters()`.
        step: Optimizer steps taken so far; a LoRA's B may be zero at first.
        thresholds: As for GradientHealthMonitor.

    Raises: ConfigError if nothing is trainable, or for a threshold out of range.
    """
    limits = HealthThresholds.of(thresholds)
    named = trained(named_parameters)
    if not named:
        raise ConfigError("check got no trainable parameter; give it model.named_parameters() with requires_grad set")
    stats = measure(named, limits.alike_share)
    found = [
        Finding(
            NON_FINITE,
            name,
            "error",
            "its gradient is not finite",
            "an overflow or a division by zero in forward or backward",
            GENERAL.non_finite("backward"),
        )
        for name in non_finite_gradients(stats)
    ]
    found += check_gradients(stats, limits, GENERAL) + check_pairs(stats, step, limits, GENERAL)
    return [Alert(step, f.check, f.layer, f.level, f.message, f.cause, f.remedy, since=step) for f in found]
