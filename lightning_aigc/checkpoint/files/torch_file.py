"""Files of torch.save: written atomically and durably, and read without running code in them."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lightning_aigc._lightning import _load
from lightning_aigc.atomic_file import atomic_file
from lightning_aigc.checkpoint.file_lock import lock_now, lock_when_free
from lightning_aigc.errors import SnapshotError

_UNFINISHED = ".{}.snapshot.tmp"


def write_torch_file(state: Any, path: Path) -> None:
    """Write a file atomically and durably.

    Raises: OSError, or whatever pickling raises; what was at `path` before is there still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, open_temporary=_open_locked) as file:
        try:
            torch.save(state, file)  # given a path it would hold the interpreter's lock while it writes
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _open_locked(target: Path) -> BinaryIO:
    """Open the temporary file of `target` under a lock, which tells another rank's `remove_unfinished` to keep it."""
    path = target.with_name(_UNFINISHED.format(target.name))
    while True:
        file = path.open("wb")
        lock_when_free(file.fileno())
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # removed between the two calls


def remove_unfinished(folder: Path) -> None:
    """Remove what killed runs left unfinished; a live run's files are locked and stay."""
    for path in folder.glob(_UNFINISHED.format("*")):
        # Another rank may finish its file, which renames it, at any moment.
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            try:
                lock_now(file.fileno())
            except OSError:
                continue
            if sys.platform == "win32":  # it removes no open file
                file.close()
            path.unlink(missing_ok=True)


def read_torch_file(path: Path, map_location: Any) -> Any:
    """Read tensors and plain types.

    Raises: FileNotFoundError, with the target of a broken link; SnapshotError if the file is damaged or holds code,
        which is never run.
    """
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(
            f"{path} points at {path.readlink()}, which was not written completely; take the newest other checkpoint"
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
