"""Safetensors files, written from host memory without a copy and read tensor by tensor, each byte checksummed once.

The safetensors library serializes from tensors and into tensors; a snapshot writes memory that it has laid out already,
in chunks, and needs the crc32 of every byte.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_aigc.errors import SnapshotError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NAMED = {name: dtype for dtype, name in DTYPES.items()}
_LONGEST_HEADER = 100_000_000
"""bytes; safetensors' own limit"""


@dataclass(frozen=True)
class Layout:
    """Offsets of tensors in a file's data: without gaps, each at a multiple of its element size.

    It holds no tensor, so that it keeps none of them alive until the file is written.
    """

    entries: dict[str, Any]
    size: int
    """bytes"""

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Layout:
        entries, size = {}, 0
        for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
            tensor, begin = tensors[name], size
            size += tensor.nbytes
            entries[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, size],
            }
        return cls(entries, size)

    def offset(self, name: str) -> int:
        begin: int = self.entries[name]["data_offsets"][0]
        return begin

    def header(self, metadata: Mapping[str, str] = MappingProxyType({})) -> bytes:
        """The bytes before the data: their length in 8 bytes, and JSON padded to a multiple of 8."""
        named = {"__metadata__": {"format": "pt", **metadata}}
        text = json.dumps(named | self.entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def read_tensors(file: BinaryIO, size: int, name: str) -> tuple[dict[str, Tensor], int]:
    """Read the tensors of an open file of `size` bytes into new memory; also returns the crc32 of all its bytes.

    Raises: SnapshotError, beginning with `name`, if it is no safetensors file; nothing in it is ever executed.
    """
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, _LONGEST_HEADER):
        refuse_code(start, name)
        raise SnapshotError(f"{name} is not a safetensors file, or was cut short: it has {size} bytes")
    text = file.read(length)
    crc = zlib.crc32(text, zlib.crc32(start))
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        wanted = sorted((*_span(entry, size), key, entry) for key, entry in entries.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(f"{name} is not a safetensors file: {error}") from error
    tensors, at = {}, 0
    for begin, end, key, entry in wanted:
        if begin != at:
            raise SnapshotError(f"{name} is not a whole safetensors file: nothing describes its bytes from {at} on")
        at = end
        tensors[key] = tensor = torch.empty(entry["shape"], dtype=_NAMED[entry["dtype"]])
        if end > begin:
            memory = tensor.view(-1).view(torch.uint8).numpy().data
            file.readinto(memory)  # type: ignore[attr-defined]
            crc = zlib.crc32(memory, crc)
    if 8 + length + at != size:
        raise SnapshotError(f"{name} has {size} bytes where its header describes {8 + length + at}")
    return tensors, crc


def refuse_code(start: bytes, name: str) -> None:
    """Raises: SnapshotError if these first bytes are those of a pickle, or of a zip as torch.save writes."""
    if start[:1] == b"\x80" or start[:4] == b"PK\x03\x04":
        kind = "a pickle" if start[:1] == b"\x80" else "a zip that may hold a pickle"
        raise SnapshotError(f"{name} is {kind}, which can run code when it is loaded; it was not read")


def _span(entry: dict[str, Any], size: int) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    length = math.prod(entry["shape"]) * _NAMED[entry["dtype"]].itemsize
    if not 0 <= begin <= end <= size or end - begin != length or min(entry["shape"], default=0) < 0:
        raise ValueError(f"impossible offsets {begin} to {end}")
    return begin, end
