"""Save the traceback of a bug in a user's class to a file, and name the file in one line on the terminal."""

from __future__ import annotations

import importlib.util
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from lightning_aigc._lightning import cli
from lightning_aigc.errors import ConfigError, UserError

FILE = "traceback.txt"
NOT_THE_USERS = ("jsonargparse", "lightning", "lightning_aigc", "torch", "diffusers")
"""Packages whose constructors name the wrong argument in their message."""


def bug_within(error: BaseException, root: Path) -> ConfigError | None:
    """A one-line ConfigError for an error raised in a user's constructor, None for any other error.

    The traceback is saved to a file in `root`, or in the system's temporary folder if `root` is not writable.
    """
    for cause in _chain(error):
        frame = None if isinstance(cause, UserError) else _constructor_of(cause)
        if frame is None:
            continue
        text = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
        last = traceback.extract_tb(cause.__traceback__)[-1]
        return ConfigError(
            f"{frame.name} in {frame.filename}:{frame.lineno} failed with {type(cause).__name__}:"
            f" {' '.join(str(cause).split())} ({Path(last.filename).name}:{last.lineno}); its traceback is in"
            f" {_save(text, root)}"
        )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, innermost first."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return reversed(found)


def _constructor_of(error: BaseException) -> traceback.FrameSummary | None:
    """The frame of the constructor that jsonargparse or LightningCLI called, None if it is in a known package."""
    frames = traceback.extract_tb(error.__traceback__)
    callers = [
        at
        for at, frame in enumerate(frames)
        if frame.filename == cli.__file__ or _is_of(frame.filename, ("jsonargparse",))
    ]
    if not callers or callers[-1] + 1 >= len(frames):
        return None
    called = frames[callers[-1] + 1]
    return None if _is_of(called.filename, NOT_THE_USERS) or called.filename.startswith("<") else called


def _is_of(filename: str, packages: tuple[str, ...]) -> bool:
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and Path(filename).is_relative_to(Path(spec.origin).parent):
            return True
    return False


def _save(text: str, root: Path) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / FILE).write_text(text, encoding="utf-8")
        return root / FILE
    except OSError:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="lightning-", suffix=f"-{FILE}", delete=False
        ) as file:
            file.write(text)
        return Path(file.name)
