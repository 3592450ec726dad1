"""Files that are either wholly there or not at all, with a checksum of what was written."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_aigc.checkpoint.tensor_file import refuse_code
from lightning_aigc.errors import SnapshotError

CHUNK = 4 * 2**20
"""bytes that are summed and written at a time: few enough calls, and still in the cache between the two"""


@dataclass(frozen=True)
class Written:
    """What a file must be, as its writer saw it."""

    size: int
    crc32: str

    @classmethod
    def of(cls, data: bytes) -> Written:
        return cls(len(data), f"{zlib.crc32(data):08x}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Write and fsync under another name, then rename; the folder's own fsync is the caller's, once for all files."""
    unfinished = path.with_name(f"{path.name}.tmp")
    size = crc = 0
    with unfinished.open("xb") as file:
        for chunk in chunks:
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    return Written(size, f"{crc:08x}")


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such call
            raise
    finally:
        os.close(folder)


def sealed(fields: dict[str, Any], indent: int | None = None) -> bytes:
    """JSON with the crc32 of all that stands before it as its last field."""
    body = json.dumps(fields, indent=indent)[:-1].rstrip().encode()
    return body + _seal(body)


def unsealed(data: bytes, name: str) -> dict[str, Any]:
    """The fields.

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
