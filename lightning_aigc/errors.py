"""Errors that a user can fix; the message says what was got, what is wanted and what to do.

The command line prints them without a traceback; in Python they are ordinary ValueErrors.
"""


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
