"""Signs that a raised learning rate harms the model: held-out loss, scores of images, size of the adapter."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer

from lightning_aigc.callbacks.fine_tune.ranks import adapter_size
from lightning_aigc.report.paired_scores import improvement

CLEAR = 2.0
"""Standard errors by which a check must lie below step 0."""
LARGEST_ADAPTER = 0.5
"""Norm of an adapter's change of the weights over the weights' own norm."""


@runtime_checkable
class ScoresImages(Protocol):
    """Scores images while training; AdaptiveLR lowers a raised rate where they get worse."""

    checks: list[Any]
    """Scores of each check, `report.paired_scores.Check`."""
    metric: str


class HarmWatch:
    """Compares the model with what it was untrained. Each new sign is told once."""

    def __init__(self) -> None:
        self.untrained_loss = math.nan
        """`val_loss` of step 0."""
        self.checks_seen = 0
        self.is_too_large = False
        self._base_norms: dict[str, float] = {}

    def held_out(self, trainer: Trainer) -> str | None:
        """A reason if `val_loss` is above the untrained model's. Call after each validation."""
        if "val_loss" not in trainer.callback_metrics:
            return None
        loss = float(trainer.callback_metrics["val_loss"])
        if trainer.global_step == 0:
            self.untrained_loss = loss
        if loss > self.untrained_loss:  # never with NaN
            return f"val_loss {loss:.4g} is above the untrained model's {self.untrained_loss:.4g}"
        return None

    def scores(self, trainer: Trainer) -> str | None:
        """A reason if the newest check of a guard is clearly below step 0."""
        found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for guard in (callback for callback in found if isinstance(callback, ScoresImages)):
            if len(guard.checks) <= max(1, self.checks_seen):
                continue
            self.checks_seen = len(guard.checks)
            first, last = (guard.checks[at].scores(guard.metric) for at in (0, -1))
            better, stderr = improvement(last, first)
            if better < -CLEAR * stderr:
                return f"the images of step {guard.checks[-1].step} score {-better:.3f} below the untrained model's"
        return None

    def adapter(self, module: LightningModule) -> str | None:
        """A reason, once, if a LoRA has grown large relative to the weights that it changes."""
        if self.is_too_large:
            return None
        size = adapter_size(module, self._base_norms)
        if size is None or size <= LARGEST_ADAPTER:
            return None
        self.is_too_large = True
        return f"the adapter's change is {size:.0%} of the weights that it changes"

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_base_norms"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
