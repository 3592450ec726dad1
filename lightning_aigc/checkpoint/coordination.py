"""Processes that share a snapshot folder: a lock that one run holds, one of each rank, and a vote of ranks by files.

The kernel holds the locks, so each is free as soon as its owner is gone, and the other ranks wait for it no longer.
Ranks vote by files, because after an error one of them may hang in a collective.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lightning_aigc.atomic_file import atomic_file
from lightning_aigc.checkpoint.file_lock import lock_now, open_lock_file
from lightning_aigc.errors import SnapshotError

NAME = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_held: set[int] = set()
VOTE_WAIT_S = 10.0
"""Longest wait of a rank for the others' votes; ranks with one error fail milliseconds to seconds apart."""
SHARED_WAIT_S = 10.0
NO = "no"
YES = "yes"


class FolderLock:
    """Locks a folder for this run until `release`, or until the process ends for any reason.

    Raises: SnapshotError with the pid and host of the live process that has it; OSError.
    """

    def __init__(self, directory: Path) -> None:
        self.run = secrets.token_hex(4)
        self._file = open_lock_file(directory / NAME)
        try:
            _lock(self._file, directory)
        except BaseException:
            os.close(self._file)
            raise
        _held.add(self._file)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "run": self.run}
        os.ftruncate(self._file, 0)
        os.write(self._file, json.dumps(owner).encode())

    def release(self) -> None:
        if self._file in _held:
            _held.discard(self._file)
            os.close(self._file)


class RankLock:
    """Locks a rank's own file in the folder until `release`, or until the process ends for any reason."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / lock_name(rank)
        self._file = open_lock_file(self._path)
        with contextlib.suppress(OSError):  # on a file system without locks no rank is ever found to be gone
            lock_now(self._file)
        _held.add(self._file)

    def release(self) -> None:
        if self._file in _held:
            _held.discard(self._file)
            os.close(self._file)
            self._path.unlink(missing_ok=True)


def lock_name(rank: int) -> str:
    return NAME if rank == 0 else f"{NAME}.rank{rank}"


def is_gone(directory: Path, rank: int) -> bool:
    """Whether the process that held this rank's lock has ended; False where that cannot be told."""
    try:
        file = open_lock_file(directory / lock_name(rank), create=False)
    except FileNotFoundError:
        return rank != 0  # it has released its lock
    except OSError:
        return False
    try:
        lock_now(file, shared=True)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def visible_ranks(directory: Path, world_size: int) -> frozenset[int]:
    """The ranks whose locks this process sees, asked while all hold theirs: some file systems lock within a node."""
    return frozenset(rank for rank in range(world_size) if not is_gone(directory, rank))


def _lock(file: int, directory: Path) -> None:
    try:
        lock_now(file)
    except BlockingIOError:
        owner = _read(directory / NAME)
        if (owner.get("pid"), owner.get("host")) == (os.getpid(), socket.gethostname()):
            raise SnapshotError(
                f"two ExactSnapshots of this process write into {directory}; leave one of them out of"
                " trainer.callbacks, or set a `directory` of its own"
            ) from None
        raise SnapshotError(
            f"{directory} is in use by process {owner.get('pid', '?')} on {owner.get('host', '?')}: two runs cannot "
            "write snapshots into one folder; wait for that run, stop it, or give this one another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{directory} is on a file system without locks; make sure that no second run writes there", stacklevel=4
        )


def run_id_of(directory: Path) -> str | None:
    """Read the id of the run that has locked this folder last; None before there is one."""
    run = _read(directory / NAME).get("run")
    return run if isinstance(run, str) else None


def _read(path: Path) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        owner = json.loads(path.read_bytes())
        if isinstance(owner, dict):
            return owner
    return {}


def _release_in_child() -> None:
    # A data worker that outlives its killed parent by seconds would keep the lock for as long.
    for file in _held:
        os.close(file)
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_release_in_child)


def check_shared(directory: str, strategy: Any, wait_s: float = SHARED_WAIT_S) -> None:
    """Let the ranks meet, and check that all see the folder that rank 0 has opened. Collective.

    Args: wait_s: how long a rank looks again: a network file system may show a new file late.
    Raises: SnapshotError on every rank, where a rank sees another folder of that name.
    """
    strategy.barrier("snapshots")
    if getattr(strategy, "world_size", 1) == 1:  # strategies of one device have none
        return
    run = strategy.broadcast(run_id_of(Path(directory)))
    end = time.monotonic() + wait_s
    while not (sees_it := run_id_of(Path(directory)) == run) and time.monotonic() < end:
        time.sleep(0.1)
    if not strategy.reduce_boolean_decision(sees_it, all=True):
        whose = "another rank does not see" if sees_it else f"this rank, on {socket.gethostname()}, does not see"
        raise SnapshotError(
            f"{whose} the snapshots of rank 0 in {directory}: the folder is not shared between the nodes; set "
            "trainer.default_root_dir to a folder on a file system that all nodes mount"
        )


def all_agree(
    directory: Path,
    rank: int,
    world_size: int,
    vote: str | None,
    wait_s: float | None = None,
    watched: Collection[int] = (),
) -> bool:
    """Return whether every rank has cast this same vote, with the same answer on every rank. Callable once a run.

    Rank 0 decides, and a rank that gave up waiting withdraws its vote. Answers can differ only if a rank stalls for
    longer than the wait at that moment, so whatever the ranks then do together needs a timeout.

    Args:
        directory: the snapshot folder, which all ranks see and rank 0 has opened.
        vote: None votes against.
        watched: ranks whose end shows by their locks; one that is gone without a vote has voted against.
    """
    wait_s = VOTE_WAIT_S if wait_s is None else wait_s
    run = run_id_of(directory)
    if run is None:
        return False
    folder = directory / f".agree.{run}"
    own, decision = folder / f"rank{rank}", folder / "decision"
    folder.mkdir(exist_ok=True)
    _put(own, NO if vote is None else vote)
    end, is_extended = time.monotonic() + wait_s, False
    while True:
        gone = {k for k in watched if k != rank and is_gone(directory, k)}
        votes = [_get(folder / f"rank{k}") or (NO if k in gone else None) for k in range(world_size)]
        said = _get(decision)
        if rank == 0:
            if None not in votes or NO in votes or time.monotonic() > end:
                is_agreed = vote is not None and all(other == vote for other in votes)
                _put(decision, YES if is_agreed else NO)
                return is_agreed
        elif said is not None or NO in votes:
            return said == YES
        elif None not in votes and not is_extended:
            end, is_extended = time.monotonic() + wait_s, True  # rank 0 is about to decide
        elif time.monotonic() > end:
            _put(own, NO)
            return _get(decision) == YES
        time.sleep(0.02)


def _put(path: Path, text: str) -> None:
    """Write a vote; do nothing if rank 0 has closed the run and removed the votes."""
    with contextlib.suppress(FileNotFoundError), atomic_file(path, durable=False, make_parent=False) as file:
        file.write(text.encode())


def _get(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
