"""The traceback of a bug in a user's own class: one line on the terminal says where it is kept."""

from __future__ import annotations

import importlib.util
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import cli

from lightning_aigc.errors import ConfigError, UserError

FILE = "traceback.txt"
NOT_THE_USERS = ("jsonargparse", "lightning", "lightning_aigc", "torch", "diffusers")
"""Packages whose constructors say in their message what argument was wrong."""


def bug_within(error: BaseException, root: Path) -> ConfigError | None:
    """One line on an error that came out of a user's constructor; its traceback goes to a file in `root`, or in the
    system's folder for temporary files if that cannot be written. None where it is no such error."""
    for one in _chain(error):
        place = None if isinstance(one, UserError) else _constructor_of(one)
        if place is None:
            continue
        text = "".join(traceback.format_exception(type(one), one, one.__traceback__))
        last = traceback.extract_tb(one.__traceback__)[-1]
        return ConfigError(
            f"{place.name} in {place.filename}:{place.lineno} failed with {type(one).__name__}:"
            f" {' '.join(str(one).split())} ({Path(last.filename).name}:{last.lineno}); its traceback is in"
            f" {_keep(text, root)}"
        )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from, the innermost first."""
    found: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in found:
        found.append(one)
        one = one.__cause__ or one.__context__
    return reversed(found)


def _constructor_of(error: BaseException) -> traceback.FrameSummary | None:
    """The frame that jsonargparse, or LightningCLI for it, called into, if it is none of the known packages' own."""
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


def _keep(text: str, root: Path) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / FILE).write_text(text, encoding="utf-8")
        return root / FILE
    except OSError:
        with tempfile.NamedTemporaryFile("w", prefix="lightning-", suffix=f"-{FILE}", delete=False) as file:
            file.write(text)
        return Path(file.name)
