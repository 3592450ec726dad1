"""Every number that decides about an alert."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_aigc.errors import ConfigError


@dataclass(frozen=True)
class HealthThresholds:
    """Limits of the checks. Raises: ConfigError that names the field outside its range.

    Example:
        >>> from lightning_aigc.callbacks import GradientHealthMonitor
        >>> monitor = GradientHealthMonitor(thresholds=HealthThresholds(exploding_ratio=20.0))
    """

    vanishing_norm: float = 1e-6
    """L2 norm of a parameter's gradient below which it vanishes."""
    exploding_norm: float = 10.0
    """L2 norm of a parameter's gradient above which it explodes, whatever came before."""
    exploding_z: float = 6.0
    """Robust z of a gradient's log norm in its own history, in scaled median deviations."""
    exploding_ratio: float = 10.0
    """Factor by which a norm must also exceed its own median, before its z counts."""
    alike_share: float = 0.9
    """Share of a gradient's values that have the same size, in (0, 1]."""
    update_ratio_high: float = 0.25
    """Norm of one step's change of a weight over the weight's norm."""
    update_ratio_low: float = 1e-8
    """The same, below which a step hardly moves anything."""
    clip_share: float = 0.9
    """Share of steps whose gradients were clipped."""
    clip_factor: float = 10.0
    """Factor by which the median norm must exceed the clip value for a warning rather than an info."""
    loss_scale_low: float = 1.0
    """Loss scale below which float16 has failed."""
    skipped_steps: int = 8
    """Skipped optimizer steps of the last 20 from which the loss scaler is a finding."""
    loss_z: float = 6.0
    """Robust z of a loss's logarithm in its own history or its timestep bucket's."""
    loss_ratio: float = 5.0
    """Factor by which a loss must also exceed its own median."""
    timestep_buckets: int = 10
    """Buckets of equal width that divide the noise schedule's timesteps."""
    history: int = 100
    """Values that a median is taken over."""
    min_history: int = 20
    """Values before which no z is taken of a loss or a global norm; half of it for a layer's norm."""
    lora_b_steps: int = 10
    """Optimizer steps after which a LoRA's B may no longer be zero."""
    lora_imbalance: float = 30.0
    """Norm of a LoRA's B over that of its A."""
    lora_delta: float = 1.0
    """Norm of what a LoRA adds to its base weight over that weight's norm."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"thresholds.{field.name} must be a number above 0, got {value!r}")
            if field.type == "int" and value != int(value):
                raise ConfigError(f"thresholds.{field.name} must be a whole number, got {value!r}")
        for name in ("alike_share", "clip_share"):
            if getattr(self, name) > 1:
                raise ConfigError(f"thresholds.{name} is a share and at most 1, got {getattr(self, name)}")

    @classmethod
    def of(cls, given: HealthThresholds | Mapping[str, Any] | None) -> HealthThresholds:
        """Thresholds from what a user gave: nothing, some of the fields, or all of them."""
        if given is None:
            return cls()
        if isinstance(given, HealthThresholds):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"thresholds must be a mapping or a HealthThresholds, got {type(given).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ConfigError(f"thresholds has no {', '.join(map(str, unknown))}; it has {', '.join(known)}")
        return cls(**given)
