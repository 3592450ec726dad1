"""Atomic file writes through a temporary file and a rename, and failed writes that a training survives."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


def _open_new(path: Path) -> BinaryIO:
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part").open("xb")


@contextlib.contextmanager
def atomic_file(
    path: Path,
    *,
    durable: bool = True,
    sync_parent: bool = True,
    make_parent: bool = True,
    open_temporary: Callable[[Path], BinaryIO] = _open_new,
) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends, and disappears when the block raises.

    Args:
        durable: fsync the content before the rename, so that a power cut leaves the old file or the new one.
        sync_parent: fsync the folder too, so that the new name is durable; a caller that writes many files into one
            folder may do that once, with `sync_folder`.
        make_parent: make the folder if it is missing.
        open_temporary: opens the temporary file of a path, in the same folder.
    Raises: OSError, with any earlier file at `path` unchanged.
    """
    if make_parent:
        path.parent.mkdir(parents=True, exist_ok=True)
    with open_temporary(path) as file:
        temporary = Path(file.name)
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            _close_on_windows(file)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                _close_on_windows(file)
                temporary.unlink(missing_ok=True)
            raise
    if durable and sync_parent:
        sync_folder(path.parent)


def _close_on_windows(file: BinaryIO) -> None:
    """Close a file where the system neither renames nor removes open ones."""
    if sys.platform == "win32":
        file.close()


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write UTF-8 text atomically. Raises: OSError."""
    with atomic_file(path, durable=durable) as file:
        file.write(text.encode())


@contextlib.contextmanager
def warns_if_unwritten(writer: str, path: Path) -> Iterator[None]:
    """Warn of an OSError in the block, which writes a file that the training can go on and end without."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        warnings.warn(f"{writer} cannot write {path}: {reason}; training continues without it", stacklevel=3)


def require_writable(path: Path) -> None:
    """Check before long work that a file or folder can be written at `path`, whose folder is made. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def sync_folder(path: Path) -> None:
    """fsync a folder, to make its file names durable. Windows has no such call."""
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without this call
            raise
    finally:
        os.close(folder)
