"""SnapshotWriter: snapshots that block training for a copy at most, and that no kill can tear."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lightning_aigc.checkpoint.coordination import FolderLock, RankLock, visible_ranks
from lightning_aigc.checkpoint.files.commit import Attempt, Part, amend_facts
from lightning_aigc.checkpoint.files.reader import find_snapshots
from lightning_aigc.checkpoint.files.safetensors_file import Layout
from lightning_aigc.checkpoint.files.serialization import pack
from lightning_aigc.checkpoint.files.staging import Copy, HostBuffer, StagingCopies, lower_priority
from lightning_aigc.checkpoint.files.storage import local_path, name_of, rotate, tidy
from lightning_aigc.errors import SnapshotError


class SnapshotWriter:
    """Writes the snapshots of one folder; each rank has its own writer for the same folder.

    Args:
        directory: The folder that holds `step-00000500` and so on; all ranks must see the same one.
        keep_last: Snapshots to keep, counted back from the newest step.
        commit_timeout_s: How long rank 0 waits for the other ranks' files, and they for its manifest.
    Attributes:
        protected: Steps that are never removed.
        blocked_s: How long the last `save`, and `finish_copy` after it, blocked the caller.
        copied_bytes: What the last `save` copied to host memory.
        written_bytes: The size of this rank's files of the last snapshot.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        keep_last: int = 5,
        commit_timeout_s: float = 600.0,
    ) -> None:
        if keep_last < 1:
            raise SnapshotError(f"keep_last must be at least 1, got {keep_last}")
        self.directory = local_path(directory)
        self.rank, self.world_size = rank, world_size
        self.keep_last, self.commit_timeout_s = keep_last, commit_timeout_s
        self.protected: set[int] = set()
        self.blocked_s = 0.0
        self.copied_bytes = self.written_bytes = 0
        self._buffers: dict[str, HostBuffer] = {}
        self._attempts: Counter[int] = Counter()
        self._lock: FolderLock | None = None
        self._rank_lock: RankLock | None = None
        self._watched: frozenset[int] = frozenset()
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._error: SnapshotError | None = None

    def open(self) -> None:
        """Make the folder; rank 0 locks it for this run and removes what a killed run left unfinished.

        Raises: SnapshotError if a live process holds the lock, or if the folder cannot be written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.rank == 0 and self._lock is None:
                self._lock = FolderLock(self.directory)
                tidy(self.directory)
            if self.rank > 0 and self._rank_lock is None:
                self._rank_lock = RankLock(self.directory, self.rank)
        except OSError as error:
            raise SnapshotError(f"no snapshots can be written to {self.directory}: {_reason(error)}") from error

    def watch_ranks(self) -> None:
        """Wait no longer for a rank that is gone. Call it once all ranks have opened the folder."""
        self._watched = visible_ranks(self.directory, self.world_size)

    @property
    def watched(self) -> frozenset[int]:
        """The ranks whose end shows by their locks."""
        return self._watched

    def save(
        self,
        step: int,
        own_state: Any,
        shared_state: Any = None,
        facts: dict[str, Any] | None = None,
        *,
        deferred: Collection[int] = (),
    ) -> None:
        """Copy the states to the host and return; a thread writes them. Every rank calls it for the same steps.

        Waits for the previous snapshot; `error` and `wait` report whether that one failed.

        Args:
            own_state: This rank's state, for `pack`.
            shared_state: The state that all ranks share; rank 0's is written.
            facts: Plain JSON for the manifest; rank 0's is written.
            deferred: `data_ptr`s of tensors that the thread may copy; call `finish_copy` before they change.
        Raises: SnapshotError if the states hold what a snapshot cannot.
        """
        start = time.perf_counter()
        if self.rank == 0 and self._lock is None:
            raise SnapshotError("open() comes before save()")
        work = Attempt(
            self.directory,
            step,
            self._attempts[step],
            self.rank,
            self.world_size,
            self.commit_timeout_s,
            run=self._lock.run if self._lock else None,
            watched=self._watched,
        )
        self._attempts[step] += 1
        self.join()
        try:
            work.facts = _checked(facts)
            to_copy = self._lay_out(work, f"rank{self.rank}", own_state)
            if self.rank == 0:
                to_copy += self._lay_out(work, "shared", shared_state)
            copies = StagingCopies(to_copy, frozenset(deferred))
        except Exception as error:
            work.abandon(_reason(error))
            raise
        self.copied_bytes = sum(part.layout.size for part in work.parts)
        self._copied.clear()
        self._thread = threading.Thread(target=self._write, args=(copies, work), name="snapshot", daemon=True)
        self._thread.start()
        self.blocked_s = time.perf_counter() - start

    def finish_copy(self) -> None:
        """Return once every tensor of the last `save` may change again."""
        start = time.perf_counter()
        self._copied.wait()
        self.blocked_s += time.perf_counter() - start

    def wait(self) -> None:
        """Return once the last `save` is durable.

        Raises: SnapshotError with the reason why it, or one before it, is not; once.
        """
        self.join()
        if (error := self.error()) is not None:
            raise error

    def amend(self, step: int, facts: dict[str, Any]) -> None:
        """Add to the facts of a durable snapshot. Rank 0 alone calls it.

        Raises: SnapshotError if the snapshot is not there or cannot be written; it then says what it said before.
        """
        folder = self.directory / name_of(step)
        try:
            amend_facts(folder, _checked(facts))
        except FileNotFoundError as error:
            last = next(iter(find_snapshots(self.directory)), None)
            again = (
                "no snapshot is left to resume from" if last is None else f"--resume continues from step {last.step}"
            )
            raise SnapshotError(
                f"the snapshot of step {step} was not written, so nothing says that this run has finished: {again}"
            ) from error
        except OSError as error:
            raise SnapshotError(f"the manifest in {folder} cannot be amended: {_reason(error)}") from error

    def error(self) -> SnapshotError | None:
        """Return what `wait` would raise, without waiting; once."""
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Wait for the last snapshot and release the folder.

        Raises: SnapshotError as `wait` does.
        """
        try:
            self.wait()
        finally:
            for lock in (self._lock, self._rank_lock):
                if lock is not None:
                    lock.release()
            self._lock = self._rank_lock = None

    def _lay_out(self, work: Attempt, stem: str, state: Any) -> list[Copy]:
        tensors, tree = pack(state)
        layout = Layout.of(tensors)
        buffer = self._buffers.setdefault(stem, HostBuffer())
        pinned = not all(tensor.is_cpu for tensor in tensors.values())
        buffer.reserve(layout.size, pinned=pinned)
        work.parts.append(Part(stem, tree, layout, buffer))
        return [(buffer, tensor, layout.offset(name)) for name, tensor in tensors.items() if tensor.numel()]

    def join(self) -> None:
        """Return once nothing is being written; `error` and `wait` still report whether the last snapshot failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, copies: StagingCopies, work: Attempt) -> None:
        try:
            try:
                copies.finish()
            finally:
                self._copied.set()
            lower_priority()  # not earlier: training waits for the copy
            self.written_bytes = work.write()
            if self.rank == 0:
                self._rotate(work.step)
        except Exception as error:
            work.abandon(_reason(error))
            self._error = SnapshotError(
                f"the snapshot of step {work.step} could not be written to {self.directory}: {_reason(error)};"
                f" {self._newest_there()}"
            )
            self._error.__cause__ = error

    def _newest_there(self) -> str:
        """The snapshot that a resume would take, of this run or of an earlier one in the same folder."""
        try:
            newest = next(iter(find_snapshots(self.directory)), None)
        except (SnapshotError, OSError):
            newest = None
        return "there is none before it" if newest is None else f"step {newest.step} is whole"

    def _rotate(self, step: int) -> None:
        try:
            rotate(self.directory, step, self.keep_last, frozenset(self.protected))
        except OSError as error:
            self._error = SnapshotError(
                f"the snapshot of step {step} is whole, but an older one could not be removed: {_reason(error)}"
            )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) if isinstance(error, SnapshotError) else f"{type(error).__name__}: {error}"


def _checked(facts: dict[str, Any] | None) -> dict[str, Any]:
    try:
        copied: dict[str, Any] = json.loads(json.dumps(facts or {}))
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"facts must be plain JSON: {error}") from error
    return copied
