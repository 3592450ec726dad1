"""Checks of settings: errors about types and ranges, and sentences on settings that change nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lightning_aigc.errors import ConfigError, ModelError

Readers = Mapping[str, tuple[str, tuple[Any, ...], str]]
"""For a setting: the one that makes it read, the values with which it does not, and a value with which it does, or
nothing where that one needs more."""


KINDS: Mapping[Any, tuple[type, str, str]] = {
    bool: (bool, "true or false", "true or false"),
    int: (Integral, "a whole number", "whole numbers"),
    float: (Real, "a number", "numbers"),
    str: (str, "a string", "strings"),
    Path: (Path, "a path", "paths"),
    NoneType: (NoneType, "None", "None"),
}
"""Kinds by their annotation: the class of values that are taken, and in an error the name of one and of several."""


def check_types(constructor: Callable[..., None], given: Mapping[str, Any]) -> None:
    """Check the arguments of a constructor by its annotations; call it first in there, with `locals()`.

    Raises: ConfigError for the first argument of another type.
    """
    for name, wanted in _of_another_type(get_type_hints(constructor), given):
        raise ConfigError(f"got {type(given['self']).__name__} {name}={given[name]!r}; wanted {wanted}")


def check_fields(settings: Any) -> None:
    """Check the values of a dataclass by its annotations. Raises: ModelError for the first of another type."""
    given = {each.name: getattr(settings, each.name) for each in fields(settings) if each.init}
    for name, wanted in _of_another_type(get_type_hints(type(settings)), given):
        raise ModelError(f"model.init_args.{name}: got {given[name]!r}; wanted {wanted}")


def _of_another_type(hints: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The values of another type than annotated, by name, with the type in words.

    Numbers, strings, lists of them and None are checked. What else an annotation names takes any value here.
    """
    for name in [name for name in hints if name in given]:
        value, hint = given[name], hints[name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if any(_wanted(kind) is None or _fits(value, kind) for kind in kinds):
            continue
        wanted = " or ".join(str(_wanted(kind)) for kind in kinds)
        is_list = isinstance(value, str) and any(get_args(kind) for kind in kinds)
        yield name, f"{wanted}; write [{value!r}]" if is_list else wanted


def _wanted(hint: Any) -> str | None:
    """The name of a kind of values; None where it is not checked."""
    if get_origin(hint) in (list, Sequence):
        [item] = get_args(hint)
        return f"a list of {KINDS[item][2]}" if item in KINDS else None
    return KINDS[hint][1] if hint in KINDS else None


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (list, Sequence):
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(_fits(v, get_args(hint)[0]) for v in value)
        )
    return isinstance(value, KINDS[hint][0]) and (hint is bool or not isinstance(value, bool))


def unknown_argument(owner: str, name: str, known: Iterable[str]) -> ModelError:
    """The error for an argument that there is not, with the nearest one."""
    near = get_close_matches(name, list(known), n=1)
    return ModelError(f"{owner} has no argument {name!r}{f'; it is called {near[0]} here' if near else ''}")


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
