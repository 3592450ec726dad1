"""Trainable parameters that no optimizer holds, before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from lightning_aigc.callbacks.health.alerts.alerts import Finding
from lightning_aigc.callbacks.health.parameter_stats import Named

NOT_IN_OPTIMIZER = "not_in_optimizer"


def check_optimizers(named: Named, optimizers: Sequence[Optimizer]) -> list[Finding]:
    """Find trainable parameters that no optimizer holds."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return [
        Finding(
            NOT_IN_OPTIMIZER,
            name,
            "error",
            "it is trainable, and no optimizer holds it",
            "configure_optimizers collected the parameters before this one existed, or chose among them",
            f"give it to the optimizer, or {name}.requires_grad_(False)",
        )
        for name, p in named
        if id(p) not in held
    ]
