"""Commit of one snapshot: every rank writes its files, then rank 0 writes the manifest that makes them a snapshot."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lightning_aigc.atomic_file import sync_folder, write_text
from lightning_aigc.checkpoint.coordination import is_gone, run_id_of
from lightning_aigc.checkpoint.files.safetensors_file import Layout
from lightning_aigc.checkpoint.files.staging import HostBuffer
from lightning_aigc.checkpoint.files.storage import (
    CHUNK,
    MANIFEST,
    FileDigest,
    complete_folders,
    publish,
    sealed,
    tidy,
    unfinished_name,
    unsealed,
    write_file,
)
from lightning_aigc.errors import SnapshotError

FORMAT = 2
GRACE_S = 5.0
"""Seconds for which a file that was written or renamed last may be invisible on another host."""
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A state in host memory and the stem of its two files."""

    stem: str
    tree: Any
    layout: Layout
    buffer: HostBuffer

    def write(self, folder: Path) -> dict[str, FileDigest]:
        tensors = write_file(
            folder / f"{self.stem}.safetensors",
            (self.layout.header(), *self.buffer.chunks(self.layout.size, CHUNK)),
        )
        tree = write_file(folder / f"{self.stem}.json", [sealed({"tree": self.tree, "tensors": tensors.as_json()})])
        return {f"{self.stem}.safetensors": tensors, f"{self.stem}.json": tree}


@dataclass
class Attempt:
    """One attempt at one snapshot, in a folder whose name no other attempt has."""

    directory: Path
    step: int
    number: int
    rank: int
    world_size: int
    timeout_s: float
    run: str | None
    """The id of the run that has locked the folder; None until it is read from there."""
    watched: frozenset[int] = frozenset()
    """The other ranks whose end shows by their locks."""
    parts: list[Part] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self) -> int:
        """Return once the snapshot is durable.

        Returns: bytes in this rank's files.
        Raises: OSError or SnapshotError; then there is no snapshot.
        """
        folder = self._folder()
        folder.mkdir(exist_ok=True)
        files: dict[str, FileDigest] = {}
        try:
            for part in reversed(self.parts):  # rankK.json last: it says that the rank has written everything
                files |= part.write(folder)
        except FileNotFoundError:
            _stop_if_failed(folder, 0)  # rank 0 removes every rank's files when it gives up
            raise
        with contextlib.suppress(FileNotFoundError):  # rank 0, who saw the last file, has renamed the folder already
            sync_folder(folder)
        if self.rank == 0:
            files |= self._commit(folder, files)
        else:
            self._wait_for_rank_0(folder)
        return sum(written.size for name, written in files.items() if self._is_own(name))

    def abandon(self, reason: str) -> None:
        """Remove what was written and tell the other ranks."""
        self.run = self.run or run_id_of(self.directory)
        if self.run is None:
            return
        folder = self._folder()
        own = "*" if self.rank == 0 else f"rank{self.rank}.*"
        with contextlib.suppress(OSError):  # `reason` matters more, and the next `open` tidies up
            if self.world_size > 1:  # first, so that a rank whose files go away finds out why
                write_text(folder / f"rank{self.rank}.failed", reason)
            for path in folder.glob(own):
                if path.suffix != ".failed":
                    path.unlink(missing_ok=True)  # another rank may rename it just now
            if self.world_size == 1:
                folder.rmdir()

    def _folder(self) -> Path:
        if self.run is None:
            self.run = self._poll(lambda: run_id_of(self.directory), "rank 0 has not opened the folder")
        return self.directory / unfinished_name(self.step, self.run, self.number)

    def _is_own(self, name: str) -> bool:
        return name.startswith(f"rank{self.rank}.") or (self.rank == 0 and not name.startswith("rank"))

    def _commit(self, folder: Path, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for rank in range(1, self.world_size):
            files = files | self._poll(
                lambda rank=rank: self._files_of(folder, rank),  # type: ignore[misc]
                f"rank {rank} has not written its files",
                rank,
            )
        fields = {
            "format": FORMAT,
            "step": self.step,
            "world_size": self.world_size,
            "attempt": folder.name,
            "facts": self.facts,
            "files": {name: written.as_json() for name, written in sorted(files.items())},
        }
        manifest = write_file(folder / MANIFEST, [sealed(fields, indent=1)])
        sync_folder(folder)
        tidy(self.directory, besides=folder)  # by now the other ranks wait for this attempt only
        publish(folder, self.step)
        return files | {MANIFEST: manifest}

    def _files_of(self, folder: Path, rank: int) -> dict[str, FileDigest] | None:
        _stop_if_failed(folder, rank)
        tree, tensors = folder / f"rank{rank}.json", folder / f"rank{rank}.safetensors"
        if not tree.exists():
            return None
        data = tree.read_bytes()
        says = FileDigest(**unsealed(data, str(tree))["tensors"])
        if (size := tensors.stat().st_size) != says.size:
            raise SnapshotError(f"{tensors} has {size} bytes, rank {rank} wrote {says.size}")
        return {tensors.name: says, tree.name: FileDigest.of(data)}

    def _wait_for_rank_0(self, folder: Path) -> None:
        missing_since: float | None = None

        def is_done() -> bool | None:
            nonlocal missing_since
            if folder.exists():
                _stop_if_failed(folder, 0)
                return None
            missing_since = missing_since or time.monotonic()
            for step, complete in complete_folders(self.directory):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    if step == self.step and json.loads((complete / MANIFEST).read_bytes())["attempt"] == folder.name:
                        return True
            if time.monotonic() - missing_since > GRACE_S:
                raise SnapshotError("rank 0 gave up on it; its own log says why")
            return None

        self._poll(is_done, "rank 0 has not written the manifest")

    def _poll(self, look: Callable[[], T | None], missing: str, of_rank: int = 0) -> T:
        end, pause_s = time.monotonic() + self.timeout_s, 0.005
        gone_since: float | None = None
        while (found := look()) is None:
            if of_rank in self.watched and of_rank != self.rank and is_gone(self.directory, of_rank):
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > GRACE_S:
                    raise SnapshotError(f"{missing}, and its process has ended")
            if time.monotonic() > end:
                raise SnapshotError(
                    f"{missing} after {self.timeout_s:g} s; all ranks need {self.directory} on a file system they share"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)
        return found


def amend_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Add facts to a complete snapshot's manifest, durably and atomically.

    Raises: OSError; SnapshotError if the manifest is torn.
    """
    manifest = folder / MANIFEST
    fields = unsealed(manifest.read_bytes(), str(manifest))
    del fields["crc32"]
    fields["facts"] |= facts
    manifest.with_name(f"{MANIFEST}.tmp").unlink(missing_ok=True)  # left by a process that was killed here
    write_file(manifest, [sealed(fields, indent=1)])
    sync_folder(folder)


def _stop_if_failed(folder: Path, rank: int) -> None:
    failed = folder / f"rank{rank}.failed"
    if failed.exists():
        raise SnapshotError(f"rank {rank} failed: {failed.read_text()}")
