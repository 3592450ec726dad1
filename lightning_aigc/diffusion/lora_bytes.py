"""A LoRA file's bytes: a safetensors header in a fixed order, with the hashes its readers look for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from lightning_aigc.errors import ModelError

HASH_KEYS = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")


def serialize(state: Mapping[str, Tensor], header: Mapping[str, str]) -> bytes:
    """The file's bytes with its hashes in the header, the same for the same input.

    safetensors writes its metadata in an order that changes from run to run, hence the header is ours.
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
    # sd-webui-additional-networks' old hash: 64 KiB from 1 MiB on, of a file with the ss_ entries alone.
    legacy = assemble({key: value for key, value in header.items() if key.startswith("ss_")})[0x100000:0x110000]
    hashes = (digest, hashlib.sha256(legacy).hexdigest()[:8], f"0x{digest}")
    return assemble({**header, **dict(zip(HASH_KEYS, hashes, strict=True))})


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside its place and move it there. Raises: ModelError naming the path if the disk refuses."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ModelError(
            f"cannot write {path} ({len(content) / 2**20:.1f} MiB): {error.strerror or error}; "
            "free some space or choose another place"
        ) from error
