"""Files and folders of snapshots on a local disk: their names, their checksums, and how they come and go.

    step-00000500                complete
    step-00000500.again          complete too, and newer: a resumed run was killed while it replaced the other
    .step-00000500.1f3a90c2.0    unfinished: the run that writes it, and how often it has tried this step before
    .gone.step-00000400          being removed
    .agree.1f3a90c2              votes of that run's ranks after an error: see `coordination`
    .lock                        see `coordination`

Every other name, and every link, belongs to the user and is left alone.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from lightning_aigc.atomic_file import atomic_file, sync_folder
from lightning_aigc.checkpoint.files.safetensors_file import refuse_code
from lightning_aigc.errors import SnapshotError

CHUNK = 4 * 2**20
"""bytes that are checksummed and written at a time: few calls, and still in the cache between the two"""
MANIFEST = "manifest.json"
AGAIN = ".again"
_COMPLETE = re.compile(r"step-(\d{8,})(\.again)?")
_LEFT_OVER = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}\.\d+|\.gone\.step-\d{8,}(\.again)?|\.agree\.[0-9a-f]{8}")

# Files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileDigest:
    """Size and checksum of a file, as its writer computed them."""

    size: int
    crc32: str

    @classmethod
    def of(cls, data: bytes) -> FileDigest:
        return cls(len(data), f"{zlib.crc32(data):08x}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a durable file atomically; the caller fsyncs the folder, once for all its files.

    The temporary file is called `<name>.tmp`, and a second writer of the same file fails.
    """
    size = crc = 0
    with atomic_file(path, sync_parent=False, open_temporary=_open_tmp) as file:
        for chunk in chunks:
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
            file.write(chunk)
    return FileDigest(size, f"{crc:08x}")


def _open_tmp(path: Path) -> BinaryIO:
    return path.with_name(f"{path.name}.tmp").open("xb")


def sealed(fields: dict[str, Any], indent: int | None = None) -> bytes:
    """Encode JSON whose last field is the crc32 of every byte before it."""
    body = json.dumps(fields, indent=indent)[:-1].rstrip().encode()
    return body + _seal(body)


def unsealed(data: bytes, name: str) -> dict[str, Any]:
    """Decode what `sealed` encoded.

    Raises: SnapshotError, beginning with `name`, after any change to the bytes.
    """
    refuse_code(data[:8], name)
    body = data[: -len(_seal(b""))]
    if data != body + _seal(body):
        raise SnapshotError(f"{name} does not match its checksum: a byte changed, or it was cut short")
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise SnapshotError(f"{name} is not a JSON object")
    return fields


def chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _seal(body: bytes) -> bytes:
    return b',\n"crc32": "%08x"}\n' % zlib.crc32(body)


# Folders -----------------------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def unfinished_name(step: int, run: str, attempt: int) -> str:
    return f".{name_of(step)}.{run}.{attempt}"


def file_names(world_size: int) -> Iterator[str]:
    """Yield the names of a snapshot's files, without its manifest."""
    for stem in chain(["shared"], (f"rank{rank}" for rank in range(world_size))):
        yield from (f"{stem}.safetensors", f"{stem}.json")


def complete_folders(directory: Path) -> list[tuple[int, Path]]:
    """List steps and folders by name alone, the newest first, links to folders included."""
    found = []
    for entry in _entries(directory):
        match = _COMPLETE.fullmatch(entry.name)
        if match and entry.is_dir():
            found.append((int(match[1]), bool(match[2]), Path(entry.path)))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def tidy(directory: Path, *, besides: Path | None = None) -> None:
    """Remove what a killed run or a failed attempt left unfinished, and finish the replacement that it had begun."""
    for entry in _entries(directory):
        is_left_over = _LEFT_OVER.fullmatch(entry.name) and (besides is None or entry.name != besides.name)
        if is_left_over and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)  # a leftover that cannot be removed does no harm
    for step, path in complete_folders(directory):
        if path.name.endswith(AGAIN):
            _replace(path, directory / name_of(step))


def publish(unfinished: Path, step: int) -> Path:
    """Rename a folder whose files are durable to its final name; a folder of that name stays loadable until then."""
    directory = unfinished.parent
    final = directory / name_of(step)
    if not os.path.lexists(final):
        unfinished.rename(final)
    else:
        again = directory / f"{final.name}{AGAIN}"
        unfinished.rename(again)
        sync_folder(directory)
        _replace(again, final)
    sync_folder(directory)
    return final


def rotate(directory: Path, step: int, keep_last: int, protected: Container[int]) -> None:
    """Remove the oldest snapshots beyond `keep_last`, counted back from `step`.

    Snapshots of later steps are neither counted nor removed: the run was resumed from before them.
    """
    own = [
        (old, path)
        for old, path in complete_folders(directory)
        if old <= step and not path.is_symlink() and (path / MANIFEST).exists()
    ]
    for old, path in own[keep_last:]:
        if old not in protected:
            remove(path)


def remove(folder: Path) -> None:
    """Remove a folder so that a part of it is never mistaken for a snapshot."""
    gone = folder.with_name(f".gone.{folder.name}")
    folder.rename(gone)
    shutil.rmtree(gone)


def _replace(again: Path, final: Path) -> None:
    if final.is_symlink():
        final.unlink()
    elif final.exists():
        remove(final)
    again.rename(final)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        yield from sorted(entries, key=lambda entry: entry.name)


# Addresses ---------------------------------------------------------------------------------------------------------


def is_remote(address: str | Path) -> bool:
    return "://" in str(address)


def local_path(address: str | Path) -> Path:
    """Raises: SnapshotError for an address with a scheme."""
    if is_remote(address):
        raise SnapshotError(
            f"{address} is a remote address; copy it to a local folder first, or pass allow_remote=True to have it read"
        )
    return Path(address).expanduser()


def download(address: str) -> Path:
    """Copy a remote folder to a local one, which is removed when the process ends."""
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(address)
    folder = tempfile.mkdtemp(prefix="snapshots-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    filesystem.get(path.rstrip("/") + "/", folder, recursive=True)
    return Path(folder)
