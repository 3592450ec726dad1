"""Manifest: what a folder of encoded shards holds, as its index.json says."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import fsspec

from lightning_aigc.errors import DataError

FILE, FORMAT = "index.json", 1
COMMON, REFERENCES = "common.safetensors", "references.safetensors"
NAME = re.compile(
    r"(?P<width>\d+)x(?P<height>\d+)-(?P<number>\d{6})\.(?P<made_of>[0-9a-f]{16})\.(?P<count>\d+)\.(?P<digest>[0-9a-f]{16})\.tar"
)


@dataclass(frozen=True)
class Shard:
    """A tar file of entries of one bucket; its name says its number, what it was made of, its entries and its bytes."""

    file: str
    width: int
    height: int
    number: int
    made_of: str
    """Head of the sha256 of the images, captions, weights and options that it was made of."""
    count: int
    digest: str
    """Head of the sha256 of its bytes."""

    @classmethod
    def from_name(cls, file: str) -> Shard | None:
        """The shard of a file name; None for any other file."""
        found = NAME.fullmatch(file)
        if found is None:
            return None
        width, height, number, count = (int(found[key]) for key in ("width", "height", "number", "count"))
        return cls(file, width, height, number, found["made_of"], count, found["digest"])


@dataclass(frozen=True)
class Manifest:
    """All shards of a folder, and what their entries were made with."""

    shards: list[Shard]
    identity: dict[str, str] = field(default_factory=dict)
    """The encoder's, which names the weights."""
    flips: bool = False
    """Whether entries hold the mirrored image's latents too."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Header entries of a LoRA file about the images."""

    def buckets(self) -> dict[tuple[int, int], list[Shard]]:
        """The shards of each (width, height), in the order of their numbers."""
        found: dict[tuple[int, int], list[Shard]] = {}
        for shard in sorted(self.shards, key=lambda s: (s.width, s.height, s.number)):
            found.setdefault((shard.width, shard.height), []).append(shard)
        return found

    @property
    def count(self) -> int:
        """Entries in all shards."""
        return sum(shard.count for shard in self.shards)

    @property
    def contents(self) -> list[int]:
        """The number of entries, and a checksum of the shards' names, which hold hashes."""
        return [self.count, crc32("".join(shard.file for shard in self.shards).encode())]

    def to_json(self) -> str:
        found = dataclasses.asdict(self) | {"format": FORMAT, "shards": [shard.file for shard in self.shards]}
        return json.dumps(found, ensure_ascii=False, indent=0) + "\n"


def join(folder: str, file: str) -> str:
    """The address of a file in a folder, which may be an fsspec address."""
    return f"{folder.rstrip('/')}/{file}"


def read_manifest(folder: str, storage_options: dict[str, Any] | None = None) -> Manifest:
    """Read a folder's index.json, from a local path or any fsspec address. Raises: DataError in one sentence."""
    address = join(folder, FILE)
    try:
        with fsspec.open(address, "rt", encoding="utf-8", **(storage_options or {})) as file:
            values = json.load(file)
        if values["format"] != FORMAT:
            raise DataError(
                f"{address} is of format {values['format']}, this version reads {FORMAT}: install a newer one"
            )
        shards = [Shard.from_name(name) for name in values["shards"]]
        if None in shards or not shards:
            raise ValueError("a shard's name is wrong" if shards else "it names no shard")
        return Manifest([s for s in shards if s], values["identity"], bool(values["flips"]), values["facts"])
    except FileNotFoundError as error:
        raise DataError(
            f"there is no {address}: `lightning encode` writes it once all shards are there; finish it, or give its"
            " folder"
        ) from error
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise DataError(
            f"{address} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}); encode the images"
            " again, or give another folder"
        ) from error
