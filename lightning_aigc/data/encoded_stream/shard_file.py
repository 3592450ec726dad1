"""ShardReader: entries of shards by place, from a local folder or fetched once from any fsspec address.

A shard is a tar file in webdataset's layout with one safetensors member an entry, so other tools read it too. It is
checked by its digest when a process first opens it, and then mapped: an entry is read where it lies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_aigc.atomic_file import atomic_file
from lightning_aigc.data.encoded_stream.manifest import Shard, join
from lightning_aigc.errors import DataError

OPEN_AT_ONCE = 32
"""Shards that a process keeps mapped."""
CHUNK = 16 * 2**20


class ShardError(DataError):
    """A shard is missing or damaged; the text names it."""


@dataclass
class OpenShard:
    """A mapped shard, and where its entries lie."""

    mapped: mmap.mmap
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]


class ShardReader:
    """Opens shards on demand and reads their entries.

    Args:
        folder: a local folder or an fsspec address.
        cache_dir: where fetched shards are kept; ranks and workers share it.
        cache_limit_gb: what they may take in all; the longest unused are deleted.
        storage_options: fsspec's, such as keys of an object store.
    """

    def __init__(
        self,
        folder: str,
        cache_dir: Path,
        cache_limit_gb: float | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.is_remote = "://" in folder or "::" in folder
        self.cache_dir = cache_dir / hashlib.sha256(folder.encode()).hexdigest()[:16]
        self.cache_limit_gb = cache_limit_gb
        self.storage_options = storage_options or {}
        self._open: OrderedDict[str, OpenShard] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}  # a worker maps for itself

    def read(self, shard: Shard, place: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and texts of one entry. Raises: ShardError."""
        opened = self.open(shard)
        start, size = int(opened.starts[place]), int(opened.sizes[place])
        data = opened.mapped[start : start + size]
        header_size = int.from_bytes(data[:8], "little")
        texts = json.loads(json.loads(data[8 : 8 + header_size])["__metadata__"]["texts"])
        return safetensors.torch.load(data), texts

    def open(self, shard: Shard) -> OpenShard:
        """Map a shard, fetched and checked. Raises: ShardError."""
        found = self._open.get(shard.file)
        if found is not None:
            self._open.move_to_end(shard.file)
            return found
        path = self._local_path(shard)
        try:
            opened = self._map(shard, path)
        except ShardError:
            if not self.is_remote:
                raise
            self._fetch(shard, path)  # not in the cache, or damaged there
            opened = self._map(shard, path)
        self._open[shard.file] = opened
        if len(self._open) > OPEN_AT_ONCE:
            self._open.popitem(last=False)
        return opened

    def _map(self, shard: Shard, path: Path) -> OpenShard:
        try:
            if digest_of(path) != shard.digest:
                raise ShardError(self._sentence(shard, "its bytes are not those that were written"))
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                with tarfile.open(fileobj=file) as tar:
                    members = tar.getmembers()
        except ShardError:
            raise
        except FileNotFoundError as error:
            raise ShardError(self._sentence(shard, "it is missing")) from error
        except (OSError, ValueError, tarfile.TarError) as error:
            raise ShardError(self._sentence(shard, str(error) or type(error).__name__)) from error
        if len(members) != shard.count:
            raise ShardError(self._sentence(shard, f"it holds {len(members)} entries, not {shard.count}"))
        places = np.array([(m.offset_data, m.size) for m in members], dtype=np.int64)
        return OpenShard(mapped, places[:, 0], places[:, 1])

    def _sentence(self, shard: Shard, what: str) -> str:
        return (
            f"the shard {join(self.folder, shard.file)} cannot be used: {what}; copy it again, delete it and run"
            " `lightning encode` once more, or set data.init_args.on_bad_shard: skip"
        )

    # Remote folders

    def _local_path(self, shard: Shard) -> Path:
        if not self.is_remote:
            return Path(self.folder) / shard.file
        path = self.cache_dir / shard.file
        with contextlib.suppress(OSError):
            os.utime(path)  # used now; deleting goes by it
        return path

    def _fetch(self, shard: Shard, path: Path) -> None:
        """Copy a shard to the cache; it appears whole or not at all, whoever else fetches it."""
        address = join(self.folder, shard.file)
        try:
            self._make_room()
            with fsspec.open(address, "rb", **self.storage_options) as source, atomic_file(path, durable=False) as file:
                while chunk := source.read(CHUNK):
                    file.write(chunk)
        except FileNotFoundError as error:
            raise ShardError(self._sentence(shard, "it is missing")) from error
        except Exception as error:  # each file system raises its own
            raise ShardError(self._sentence(shard, f"{type(error).__name__}: {str(error).splitlines()[:1]}")) from error

    def _make_room(self) -> None:
        if self.cache_limit_gb is None or not self.cache_dir.is_dir():
            return
        files = sorted(((f.stat().st_atime, f.stat().st_size, f) for f in self._cached()), key=lambda found: found[0])
        spare = self.cache_limit_gb * 1e9 - sum(size for _, size, _ in files)
        for _, size, file in files[:-1]:
            if spare > 0:
                return
            with contextlib.suppress(OSError):  # another worker may have deleted it; who has it mapped reads on
                file.unlink()
            spare += size

    def _cached(self) -> Iterator[Path]:
        yield from self.cache_dir.glob("*.tar")


def digest_of(path: Path) -> str:
    """The head of a file's sha256. Raises: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
