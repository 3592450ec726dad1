"""Files of torch.save: written whole or not at all, and read without running any code in them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.utilities.cloud_io import _load

from lightning_aigc.checkpoint.files import sync_folder
from lightning_aigc.errors import SnapshotError

_UNFINISHED = ".{}.snapshot.tmp"


def write_torch_file(state: Any, path: Path) -> None:
    """Write under another name, fsync, rename, fsync the folder.

    Raises: OSError, or whatever pickling raises; what was at `path` before is there still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(_UNFINISHED.format(path.name))
    with _open_locked(unfinished) as file:
        try:
            try:
                torch.save(state, file)  # by its path, it would keep the interpreter's lock for as long as it writes
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            file.flush()
            os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def _open_locked(path: Path) -> BinaryIO:
    """The lock says to `remove_unfinished` of another rank that somebody is at it."""
    while True:
        file = path.open("wb")
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # removed between the two calls


def remove_unfinished(folder: Path) -> None:
    """Remove what killed runs left half written; of a live one nothing."""
    for path in folder.glob(_UNFINISHED.format("*")):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            path.unlink(missing_ok=True)


def read_torch_file(path: Path, map_location: Any) -> Any:
    """What was saved, of tensors and plain types alone.

    Raises: FileNotFoundError, saying what a broken link points at; SnapshotError if the file is torn or holds code,
        none of which is run.
    """
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(
            f"{path} points at {path.readlink()}, which was never written whole; take the newest checkpoint beside it"
        )
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    with _refusals_of(path):
        return torch.load(path, map_location=map_location, weights_only=True)


def read_remote_torch_file(address: str, map_location: Any) -> Any:
    """Raises: SnapshotError as `read_torch_file` does."""
    with _refusals_of(address):
        return _load(address, map_location=map_location, weights_only=True)


@contextlib.contextmanager
def _refusals_of(path: str | Path) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        names = ", ".join(sorted(set(re.findall(r"GLOBAL (\S+)", str(error))))) or "no tensors and plain types alone"
        raise SnapshotError(
            f"{path} was not loaded: it holds {names}, and could run code that way. If you wrote it, save it again "
            "with tensors and plain types in it"
        ) from None
    except (RuntimeError, EOFError) as error:
        reason = str(error).partition("\n")[0] or "it ends too early"
        raise SnapshotError(f"{path} is not a whole checkpoint: {reason}") from error
