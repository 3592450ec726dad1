"""Addresses: snapshots and checkpoints are read from local folders, unless a remote one is asked for."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from lightning_aigc.errors import SnapshotError


def is_remote(address: str | Path) -> bool:
    return "://" in str(address)


def local_path(address: str | Path) -> Path:
    """Raises: SnapshotError for an address with a scheme."""
    if is_remote(address):
        raise SnapshotError(
            f"{address} is a remote address; copy it to a local folder first, or pass allow_remote=True to have it read"
        )
    return Path(address).expanduser()


def fetched(address: str) -> Path:
    """A local copy of a remote folder, removed when the process ends."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    filesystem, path = url_to_fs(address)
    folder = tempfile.mkdtemp(prefix="snapshots-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    filesystem.get(path.rstrip("/") + "/", folder, recursive=True)
    return Path(folder)
