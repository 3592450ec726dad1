"""The errors that a user can mend: their text says what was got, what is wanted and what to do.

The command line prints them alone, without a traceback; in Python they are ordinary ValueErrors.
"""


class UserError(ValueError):
    """Something in the user's hands is wrong; the message names the file or the key."""


class DataError(UserError):
    """A picture, caption, folder or cache."""


class ModelError(UserError):
    """A pipeline folder, a model argument, or weights that do not fit."""


class ConfigError(UserError):
    """A key, type or class in a YAML file or on the command line."""


class SnapshotError(UserError):
    """A snapshot or checkpoint that cannot be written, found, read or trusted."""


class ImageWarning(UserWarning):
    """A generated or loaded picture is black, constant or not finite."""


class SamplingTooSlow(UserError):  # noqa: N818  it says what happened, and nothing failed
    """Generating the pictures asked for would take longer than the limit; training goes on without them."""
