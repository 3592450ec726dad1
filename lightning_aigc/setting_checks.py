"""Checks of settings: errors about ranges that give the YAML key, and sentences on settings that change nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lightning_aigc.errors import ModelError

Readers = Mapping[str, tuple[str, tuple[Any, ...], str]]
"""For a setting: the one that makes it read, the values with which it does not, and a value with which it does, or
nothing where that one needs more."""


KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    Sequence: ((list, tuple), "a list"),
    list: ((list, tuple), "a list"),
    type(None): (type(None), "null"),
}
"""For a type in a signature: the classes of its values, and its name in a sentence."""


def check_types(settings: Any) -> None:
    """Raise ModelError for the first field of a dataclass whose value is of another type than its annotation."""
    hints = get_type_hints(type(settings))
    for each in fields(settings):
        value = getattr(settings, each.name)
        kinds = _kinds(hints[each.name]) if each.init else []
        fits = [isinstance(value, KINDS[kind][0]) and (kind is bool) >= isinstance(value, bool) for kind in kinds]
        if kinds and not any(fits):
            wanted = " or ".join(dict.fromkeys(KINDS[kind][1] for kind in kinds))
            if isinstance(value, str):
                wanted = wanted.replace("a list", f"a list such as [{value}]")
            raise ModelError(f"model.init_args.{each.name} must be {wanted}, got {value!r}")


def _kinds(hint: Any) -> list[Any]:
    """The types that a value may have; none where one of them is not in `KINDS`."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    found = [get_origin(part) or part for part in parts]
    return found if all(part in KINDS for part in found) else []


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
