"""One run in a snapshot folder at a time, held by the kernel: it is free the moment its owner is gone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import warnings
from pathlib import Path

from lightning_aigc.errors import SnapshotError

NAME = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_held: set[int] = set()


class FolderLock:
    """A folder that is this run's until `release`, or until the process ends in whatever way.

    Raises: SnapshotError with the pid and host of the live process that has it; OSError.
    """

    def __init__(self, directory: Path) -> None:
        self.run = secrets.token_hex(4)
        self._file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            _lock(self._file, directory)
        except BaseException:
            os.close(self._file)
            raise
        _held.add(self._file)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "run": self.run}
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(owner).encode(), 0)

    def release(self) -> None:
        if self._file in _held:
            _held.discard(self._file)
            os.close(self._file)


def _lock(file: int, directory: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _read(directory / NAME)
        raise SnapshotError(
            f"{directory} is in use by process {owner.get('pid', '?')} on {owner.get('host', '?')}: two runs cannot "
            "write snapshots into one folder; wait for that run, stop it, or give this one another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{directory} is on a file system without locks; see to it that no second run writes there", stacklevel=4
        )


def run_in(directory: Path) -> str | None:
    """The name that the run in this folder gave itself, None before there is one."""
    run = _read(directory / NAME).get("run")
    return run if isinstance(run, str) else None


def _read(path: Path) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        owner = json.loads(path.read_bytes())
        if isinstance(owner, dict):
            return owner
    return {}


def _let_go_in_child() -> None:
    # A data worker that outlives its killed parent by seconds would keep the lock for as long.
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
