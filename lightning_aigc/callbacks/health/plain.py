"""The checks for a plain torch loop: one look at gradients and weights, no Trainer, no history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from lightning_aigc.callbacks.health.alert import Alert, Finding
from lightning_aigc.callbacks.health.gradients import check_gradients, non_finite_gradients
from lightning_aigc.callbacks.health.lora import check_pairs
from lightning_aigc.callbacks.health.measurement import measure
from lightning_aigc.callbacks.health.names import trained
from lightning_aigc.callbacks.health.remedies import GENERAL
from lightning_aigc.callbacks.health.thresholds import HealthThresholds
from lightning_aigc.errors import ConfigError


def check(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    step: int = 0,
    thresholds: HealthThresholds | Mapping[str, Any] | None = None,
) -> list[Alert]:
    """Every alert that one look gives, between backward and the optimizer's step; waits for the device once.

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
    now = measure(named, limits.alike_share)
    found = [
        Finding(
            "non_finite",
            name,
            "error",
            "its gradient is not finite",
            "an overflow or a division by zero in forward or backward",
            GENERAL.non_finite("backward"),
        )
        for name in non_finite_gradients(now)
    ]
    found += check_gradients(now, limits, GENERAL) + check_pairs(now, step, limits, GENERAL)
    return [Alert(step, f.check, f.layer, f.level, f.message, f.cause, f.remedy, since=step) for f in found]
