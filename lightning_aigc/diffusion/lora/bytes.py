"""Serialize a LoRA file: safetensors with a sorted header and the hashes that A1111 and others read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from lightning_aigc.atomic_file import atomic_file
from lightning_aigc.errors import ModelError

HASH_KEYS = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")


def serialize(state: Mapping[str, Tensor], header: Mapping[str, str]) -> bytes:
    """The bytes of the file with its hashes in the header, equal for equal input.

    safetensors writes metadata in an order that varies between runs, so the header is built here.
    """
    plain = safetensors.torch.save({key: value.detach().cpu().contiguous() for key, value in state.items()})
    length = int.from_bytes(plain[:8], "little")
    entries, tensors = json.loads(plain[8 : 8 + length]), plain[8 + length :]

    def assemble(metadata: Mapping[str, str]) -> bytes:
        ordered = {"__metadata__": dict(sorted(metadata.items())), **entries}
        text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + tensors

    digest = hashlib.sha256(tensors).hexdigest()
    # sd-webui-additional-networks' old hash: the 64 KiB at 1 MiB of a file with only the ss_ entries.
    legacy = assemble({key: value for key, value in header.items() if key.startswith("ss_")})[0x100000:0x110000]
    hashes = (digest, hashlib.sha256(legacy).hexdigest()[:8], f"0x{digest}")
    return assemble({**header, **dict(zip(HASH_KEYS, hashes, strict=True))})


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file, then rename it to `path`. Raises: ModelError naming the path if it cannot be written."""
    try:
        with atomic_file(path) as stream:
            stream.write(content)
    except OSError as error:
        raise ModelError(
            f"cannot write {path} ({len(content) / 2**20:.1f} MiB): {error.strerror or error}; "
            "free some space or choose another folder"
        ) from error
