"""Range checks of settings, with errors that give the YAML key."""

from __future__ import annotations

import math
from typing import Any

from lightning_aigc.errors import ModelError


def check_at_least_one(settings: Any, *names: str) -> None:
    """Raise ModelError for the first of these settings below 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ModelError(f"model.init_args.{name} must be at least 1, got {getattr(settings, name)}")


def check_positive(settings: Any, *names: str) -> None:
    """Raise ModelError for the first of these settings that is neither None nor above 0 and finite."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:  # written so that NaN fails too
            raise ModelError(f"model.init_args.{name} must be above 0 and finite, got {value}")


def check_not_negative(settings: Any, *names: str) -> None:
    """Raise ModelError for the first of these settings that is negative or not finite."""
    for name in names:
        if not 0 <= getattr(settings, name) < math.inf:
            raise ModelError(f"model.init_args.{name} must not be negative, got {getattr(settings, name)}")


def check_share(settings: Any, *names: str) -> None:
    """Raise ModelError for the first of these settings outside 0..1."""
    for name in names:
        if not 0 <= getattr(settings, name) < 1:
            raise ModelError(f"model.init_args.{name} must be in 0..1 and below 1, got {getattr(settings, name)}")
