"""TensorCache: tensors on disk, one safetensors file per key, written atomically and verified by checksum."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lightning_aigc.atomic_file import atomic_file, require_writable
from lightning_aigc.data.cache.resources import cpu_cores
from lightning_aigc.errors import DataError

CACHE_FORMAT = 1

Entry = dict[str, Tensor]


class CorruptEntryError(Exception):
    """A cache file is damaged; the text says how."""


@dataclass
class FillResult:
    """Counts of one rank's fill: entries ready before, encoded now, and of these re-encoded after damage."""

    ready: int = 0
    encoded: int = 0
    repaired: int = 0
    written_bytes: int = 0

    def __str__(self) -> str:
        repaired = f", {self.repaired} of them were damaged files" if self.repaired else ""
        return f"{self.ready} ready, {self.encoded} encoded now{repaired}"


def cache_key(**parts: object) -> str:
    """The cache key of an entry, a hash of everything it depends on; parts must be plain JSON values."""
    return sha256(json.dumps({"format": CACHE_FORMAT, **parts}, sort_keys=True).encode()).hexdigest()


def check_writable(folder: Path) -> None:
    """Check before any encoding that the cache can be written. Raises: DataError."""
    try:
        require_writable(folder / "entry")
    except OSError as error:
        raise _cannot_write(folder, error) from error


class TensorCache:
    """A folder of entries, each a few named tensors with a checksum."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """The file of an entry."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def read(self, key: str) -> Entry | None:
        """Read an entry, None if it is absent. Raises: CorruptEntryError."""
        try:
            content = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CorruptEntryError(str(error)) from error
        try:
            header_bytes = int.from_bytes(content[:8], "little")
            metadata = json.loads(content[8 : 8 + header_bytes]).get("__metadata__", {})
            if zlib.crc32(content[8 + header_bytes :]) != int(metadata["crc32"]):
                raise CorruptEntryError("checksum differs")
            return safetensors.torch.load(content)
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise CorruptEntryError(str(error)) from error

    def write(self, key: str, entry: Entry) -> int:
        """Store an entry; a reader sees all of it or nothing. Returns: its bytes.

        Raises: DataError if the disk is full or read-only.
        """
        contiguous = {name: tensor.contiguous() for name, tensor in entry.items()}
        plain = safetensors.torch.save(contiguous)
        crc32 = zlib.crc32(plain[8 + int.from_bytes(plain[:8], "little") :])
        content = safetensors.torch.save(contiguous, metadata={"crc32": str(crc32)})
        path = self.path(key)
        try:
            with atomic_file(path, durable=False) as file:
                file.write(content)
        except OSError as error:
            raise _cannot_write(self.folder.parent, error) from error
        return len(content)

    def fill(
        self,
        keys: Sequence[str],
        groups: Sequence[Hashable],
        encode: Callable[[list[int]], list[Entry]],
        batch_size: int,
        progress: str | None = None,
    ) -> FillResult:
        """Encode the entries that are absent or damaged.

        Args:
            keys: The entries wanted.
            groups: For each key, the group (shape) that all entries of one encoder call share.
            encode: Returns the entries for positions in `keys`.
            batch_size: Most entries per encoder call.
            progress: Title of a progress bar, None for none.
        """
        damaged = [state == "damaged" for state in self._states(keys)]
        absent = [position for position, key in enumerate(keys) if damaged[position] or not self.path(key).exists()]
        result = FillResult(len(keys) - len(absent), len(absent), sum(damaged))
        if not absent:
            return result
        from tqdm import tqdm

        with tqdm(total=len(absent), desc=progress, unit="entry", disable=progress is None) as bar:
            for positions in _batches(absent, groups, batch_size):
                for position, entry in zip(positions, encode(positions), strict=True):
                    result.written_bytes += self.write(keys[position], entry)
                bar.update(len(positions))
        return result

    def read_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Read entries in order, None for each that is absent or damaged."""

        def read(key: str) -> Entry | None:
            try:
                return self.read(key)
            except CorruptEntryError:
                return None

        with ThreadPoolExecutor(min(8, cpu_cores())) as pool:
            return list(pool.map(read, keys, chunksize=64))

    def size_bytes(self, keys: Sequence[str]) -> int:
        """Bytes on disk of the entries that exist."""
        return sum(path.stat().st_size for path in map(self.path, keys) if path.exists())

    def _states(self, keys: Sequence[str]) -> list[str]:
        def state(key: str) -> str:
            try:
                return "absent" if self.read(key) is None else "ready"
            except CorruptEntryError:
                return "damaged"

        with ThreadPoolExecutor(min(8, cpu_cores())) as pool:
            return list(pool.map(state, keys, chunksize=64))


def require_finite(tensor: Tensor, what: str, key: str) -> None:
    """Raise DataError if an encoding holds NaN or infinity; `key` is the advice in its message."""
    if not torch.isfinite(tensor).all():
        raise DataError(f"{what} was encoded to values that are NaN or infinite; {key}")


def _batches(absent: list[int], groups: Sequence[Hashable], batch_size: int) -> Iterator[list[int]]:
    by_group: dict[Hashable, list[int]] = {}
    for position in absent:
        by_group.setdefault(groups[position], []).append(position)
    for members in by_group.values():
        for at in range(0, len(members), batch_size):
            yield members[at : at + batch_size]


def _cannot_write(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write the cache in {folder}: {error.strerror or error}; free some space there, "
        "or set data.init_args.cache_dir to a folder that can be written"
    )
