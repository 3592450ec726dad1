"""Locks of open files, which end with the process that has them: `flock`, and on Windows a locked byte."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    LOCKED_BYTE = 2**30
    """Position of the byte that is locked: far behind the end, because Windows lets nobody read a locked byte."""
    POLL_S = 0.05

    def lock_now(file: int, *, shared: bool = False) -> None:
        """Lock an open file. Raises: BlockingIOError if another process has locked it. `shared` has no meaning here."""
        position = os.lseek(file, 0, os.SEEK_CUR)
        os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from None
        finally:
            os.lseek(file, position, os.SEEK_SET)

    def lock_when_free(file: int) -> None:
        """Lock an open file as soon as no other process has locked it."""
        while True:
            try:
                return lock_now(file)
            except BlockingIOError:
                time.sleep(POLL_S)

else:
    import fcntl

    def lock_now(file: int, *, shared: bool = False) -> None:
        """Lock an open file.

        Args: shared: any number of processes may have such a lock, while none has another.
        Raises: BlockingIOError if another process has locked it; OSError on a file system without locks.
        """
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def lock_when_free(file: int) -> None:
        """Lock an open file as soon as no other process has locked it."""
        fcntl.flock(file, fcntl.LOCK_EX)


def open_lock_file(path: Path, *, create: bool = True) -> int:
    """Open a file to lock it; a link is refused where the system can, and child programs do not get it.

    Raises: FileNotFoundError without `create`; OSError.
    """
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    return os.open(path, flags | (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY), 0o644)
