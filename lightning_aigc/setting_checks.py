"""Checks of settings: errors about ranges that give the YAML key, and sentences on settings that change nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning_aigc.errors import ConfigError, ModelError

Readers = Mapping[str, tuple[str, tuple[Any, ...], str]]
"""For a setting: the one that makes it read, the values with which it does not, and a value with which it does, or
nothing where that one needs more."""


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


_TIME = re.compile(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)")


def as_timedelta(value: Any, name: str) -> timedelta | None:
    """Return a time that may be given in seconds, or as a text such as 0:05:00.

    Raises: ConfigError for anything else, and for a time that is not above 0.
    """
    found: timedelta | None = value if isinstance(value, timedelta) else None
    if isinstance(value, str) and (parts := _TIME.fullmatch(value.strip())):
        days, hours, minutes, seconds = (float(part or 0) for part in parts.groups())
        found = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        found = timedelta(seconds=value)
    if value is not None and (found is None or found <= timedelta(0)):
        raise ConfigError(f"{name} must be seconds above 0, or a text such as 0:05:00; got {value!r}")
    return found


def unread_settings(
    given: Mapping[str, Any], defaults: Mapping[str, Any], readers: Readers, where: str = "model.init_args"
) -> list[str]:
    """Return a sentence for each setting that differs from its default and that no other setting reads.

    Args:
        given, defaults: Values by name.
        where: The key in front of the names.
    """
    return [
        f"{where}.{name}: {as_yaml(given[name])} changes nothing while {reader} is {as_yaml(given[reader])};"
        f"{f' set {where}.{reader}: {on}, or' if on else ''} remove {name}"
        for name, (reader, off, on) in readers.items()
        if _plain(given[name]) != _plain(defaults[name]) and given[reader] in off
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def as_yaml(value: Any) -> str:
    """A value as one types it in a YAML; `unset` for None."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
