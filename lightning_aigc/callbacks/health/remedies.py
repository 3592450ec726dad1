"""What to change, as the config line of the run at hand, or in words where there is no such key."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True)
class Remedies:
    """The keys that this run has; without a Trainer every remedy is in general terms."""

    model_keys: Collection[str] = ()
    """Arguments of the LightningModule."""
    precision_key: str = "precision"
    """Where the Trainer's config holds the precision."""
    precision: str = ""
    rate: float | None = None
    """The highest learning rate now."""
    clip: float | None = None
    """The Trainer's gradient_clip_val."""

    @classmethod
    def of(cls, trainer: Trainer, model: LightningModule) -> Remedies:
        """The remedies of a run."""
        own = bool(getattr(trainer.precision_plugin, "protect", None) is not None)  # FusedBackwardPrecision
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return cls(
            model_keys=frozenset(inspect.signature(type(model).__init__).parameters),
            precision_key="trainer.plugins.init_args.precision" if own else "trainer.precision",
            precision=str(trainer.precision),
            rate=max((float(group.get("lr", 0)) for group in groups), default=None),
            clip=trainer.gradient_clip_val,
        )

    def learning_rate(self, factor: float) -> str:
        """Change the learning rate by a factor."""
        key = "model.init_args.learning_rate" if "learning_rate" in self.model_keys else "learning_rate"
        if self.rate:
            return f"{key}: {self.rate * factor:.3g}"
        return f"{key}: {factor:g} times what it is"

    def safe_precision(self) -> str:
        """bfloat16, or float32 where it is bfloat16 already."""
        return f"{self.precision_key}: {'32-true' if self.precision.startswith('bf16') else 'bf16-mixed'}"

    def mixed_precision(self) -> str:
        """Weights in float32."""
        return f"{self.precision_key}: {'32-true' if 'mixed' in self.precision else 'bf16-mixed'}"

    def clipping(self, value: float) -> str:
        return f"trainer.gradient_clip_val: {value:.3g}"

    def model(self, key: str, value: Any, otherwise: str) -> str:
        """An argument of the model, where it has one of this name."""
        return f"model.init_args.{key}: {value}" if key in self.model_keys else otherwise

    def non_finite(self, phase: str) -> str:
        """Against values that are not finite, by where they came from."""
        if self.precision.startswith("16") or (self.precision == "" and phase != "input"):
            return f"{self.precision_key}: bf16-mixed"
        if phase == "input":
            return self.model("vae_dtype", "float32", "look at this batch's data for values that are not finite")
        return self.learning_rate(0.1) if phase != "code" else "look at the hooks and callbacks that change gradients"


GENERAL = Remedies()
"""For code without a Trainer."""
