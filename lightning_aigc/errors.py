"""Errors that a user can fix; the message says what was got, what is wanted and what to do.

The command line prints them without a traceback; in Python they are ordinary ValueErrors.
"""

from collections.abc import Mapping
from typing import Any

Readers = Mapping[str, tuple[str, tuple[Any, ...], str]]
"""For a setting: the one that makes it read, the values with which it does not, and a value with which it does."""


class UserError(ValueError):
    """Base class of errors in the user's input; the message names the file or key."""


class DataError(UserError):
    """Error in an image, caption, folder or cache."""


class ModelError(UserError):
    """Error in a pipeline folder or model argument, or weights that do not match."""


class ConfigError(UserError):
    """Error in a key, type or class in YAML or on the command line."""


class SnapshotError(UserError):
    """A snapshot or checkpoint that cannot be written, found, read or trusted."""


class ImageWarning(UserWarning):
    """A generated or loaded image is black, constant or not finite."""


class SamplingTooSlow(UserError):  # noqa: N818  not a failure
    """Sampling would take longer than the time limit; training continues without the images."""


def unread_settings(
    given: Mapping[str, Any], defaults: Mapping[str, Any], readers: Readers, where: str = "model.init_args"
) -> list[str]:
    """Return a sentence for each setting that differs from its default and that no other setting reads.

    Args:
        given, defaults: Values by name.
        where: The key in front of the names.
    """
    return [
        f"{where}.{name}: {_yaml(given[name])} changes nothing while {reader} is {_yaml(given[reader])}; set {where}.{reader}:"
        f" {on}, or remove {name}"
        for name, (reader, off, on) in readers.items()
        if _plain(given[name]) != _plain(defaults[name]) and given[reader] in off
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _yaml(value: Any) -> str:
    return "unset" if value is None else str(value).lower()
