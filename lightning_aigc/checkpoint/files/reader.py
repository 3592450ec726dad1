"""Find, verify and read the snapshots in a folder. Nothing in them is ever executed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_aigc.checkpoint.files.commit import FORMAT
from lightning_aigc.checkpoint.files.safetensors_file import read_tensors, refuse_code
from lightning_aigc.checkpoint.files.serialization import unpack
from lightning_aigc.checkpoint.files.storage import (
    MANIFEST,
    FileDigest,
    chunks_of,
    complete_folders,
    download,
    file_names,
    is_remote,
    local_path,
    unsealed,
)
from lightning_aigc.errors import SnapshotError


@dataclass(frozen=True)
class Snapshot:
    """A snapshot whose manifest was read; its other files are verified when they are read."""

    path: Path
    step: int
    world_size: int
    facts: dict[str, Any]
    files: Mapping[str, FileDigest] = field(repr=False)

    @classmethod
    def at(cls, path: Path) -> Snapshot:
        """Raises: SnapshotError with what is wrong with the manifest."""
        manifest = path / MANIFEST
        fields = unsealed(_read(manifest), str(manifest))
        if fields.get("format") != FORMAT:
            raise SnapshotError(
                f"{manifest} is of format {fields.get('format')!r}; this version reads {FORMAT}: resume with the"
                " version that wrote it"
            )
        try:
            world_size = int(fields["world_size"])
            files = {name: FileDigest(**fields["files"][name]) for name in file_names(world_size)}
            return cls(path, int(fields["step"]), world_size, dict(fields["facts"]), files)
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"{manifest} is no manifest: {type(error).__name__}: {error}") from error

    def shared(self) -> Any:
        """Read the state that all ranks share.

        Raises: SnapshotError with the file and what is wrong with it.
        """
        return self._load("shared")

    def rank(self, rank: int) -> Any:
        """Read the state of one rank.

        Raises: SnapshotError with the file and what is wrong with it.
        """
        if not 0 <= rank < self.world_size:
            raise SnapshotError(f"{self.path} was written by {self.world_size} rank(s); there is no rank {rank} in it")
        return self._load(f"rank{rank}")

    def verify(self) -> None:
        """Read every byte.

        Raises: SnapshotError with the first file that is missing, torn or changed.
        """
        for name in self.files:
            path = self._sized(name)
            crc = 0
            try:
                for chunk in chunks_of(path):
                    crc = zlib.crc32(chunk, crc)
            except OSError as error:
                raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
            self._compare(name, crc)

    def _load(self, stem: str) -> Any:
        tree, tensors = f"{stem}.json", f"{stem}.safetensors"
        data = _read(self._sized(tree))
        self._compare(tree, zlib.crc32(data))
        path = self._sized(tensors)
        try:
            with path.open("rb") as file:
                values, crc = read_tensors(file, self.files[tensors].size, str(path))
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
        self._compare(tensors, crc)
        return unpack(values, unsealed(data, str(self.path / tree)).get("tree"))

    def _sized(self, name: str) -> Path:
        path, wanted = self.path / name, self.files[name].size
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                start = file.read(8)
        except FileNotFoundError:
            raise SnapshotError(f"{path} is missing") from None
        except OSError as error:
            raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
        if size != wanted:
            refuse_code(start, str(path))
            raise SnapshotError(f"{path} has {size} bytes, the manifest says {wanted}: it was cut short or changed")
        return path

    def _compare(self, name: str, crc: int) -> None:
        if f"{crc:08x}" != self.files[name].crc32:
            raise SnapshotError(f"{self.path / name} does not match its checksum: a byte changed")


def find_snapshots(directory: str | Path, *, allow_remote: bool = False) -> list[Snapshot]:
    """List the snapshots whose manifest can be read, the highest step first.

    Raises: SnapshotError for a remote address.
    """
    return _found(_folder(directory, allow_remote), lambda line: None)


def newest_complete(
    directory: str | Path, say: Callable[[str], None], *, allow_remote: bool = False
) -> Snapshot | None:
    """The newest snapshot whose every byte matches its checksum.

    Args: say: gets a line for each newer snapshot that was skipped, with the file and what is wrong with it.
    Raises: SnapshotError for a remote address.
    """
    for snapshot in _found(_folder(directory, allow_remote), say):
        try:
            snapshot.verify()
        except SnapshotError as error:
            say(f"{snapshot.path.name} is skipped: {error}")
        else:
            return snapshot
    return None


def _found(folder: Path, say: Callable[[str], None]) -> list[Snapshot]:
    found = []
    for _, path in complete_folders(folder) if folder.is_dir() else ():
        try:
            found.append(Snapshot.at(path))
        except SnapshotError as error:
            say(f"{path.name} is skipped: {error}")
    return found


def _folder(directory: str | Path, allow_remote: bool) -> Path:
    return download(str(directory)) if allow_remote and is_remote(directory) else local_path(directory)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SnapshotError(f"{path} is missing: the snapshot was not finished, or only a part of it copied") from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
