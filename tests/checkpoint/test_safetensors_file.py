"""Our files are safetensors' own, byte for byte in meaning, whatever the memory looks like that they come from."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lightning_aigc.checkpoint.files import staging
from lightning_aigc.checkpoint.files.safetensors_file import DTYPES, Layout, read_tensors
from lightning_aigc.checkpoint.files.staging import HostBuffer
from lightning_aigc.checkpoint.files.storage import write_file
from lightning_aigc.errors import SnapshotError


def write(path: Path, tensors: dict[str, torch.Tensor], buffer: HostBuffer | None = None, chunk: int = 1000) -> None:
    layout, buffer = Layout.of(tensors), buffer or HostBuffer()
    buffer.reserve(layout.size, pinned=False)
    for name, tensor in tensors.items():
        buffer.copy_from(tensor, layout.offset(name))
    write_file(path, (layout.header(), *buffer.chunks(layout.size, chunk)))


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {str(dtype): torch.randn(7, 5).mul(50).abs().to(dtype) for dtype in DTYPES}
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "步": torch.ones(1, dtype=torch.bool)}


def test_safetensors_reads_what_we_wrote(tmp_path: Path) -> None:
    tensors = some_tensors()
    write(tmp_path / "x.safetensors", tensors)
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype is tensor.dtype and read[name].shape == tensor.shape
        assert bytes(read[name].view(-1).view(torch.uint8)) == bytes(tensor.view(-1).view(torch.uint8))


def test_we_read_what_safetensors_wrote() -> None:
    tensors = some_tensors()
    data = safetensors.torch.save(tensors)
    read, _ = read_tensors(io.BytesIO(data), len(data), "x")
    assert read.keys() == tensors.keys()
    assert all(
        bytes(read[n].view(-1).view(torch.uint8)) == bytes(t.view(-1).view(torch.uint8)) for n, t in tensors.items()
    )


def test_tensors_across_the_borders_of_slabs_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLAB", 2**16)
    torch.manual_seed(1)
    tensors = {f"t{i}": torch.randn(1 + 9173 * i) for i in range(8)}
    tensors |= {
        "column": torch.randn(300, 400).T,
        "half": torch.randn(70001).half(),
        "bytes": torch.arange(99999).byte(),
    }
    write(tmp_path / "x.safetensors", tensors, chunk=1 << 20)
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_memory_is_used_again_and_grows_by_what_is_missing() -> None:
    buffer = HostBuffer()
    buffer.reserve(100_000, pinned=False)
    (first,) = (slab.data_ptr() for slab in buffer._slabs)
    buffer.reserve(90_000, pinned=False)
    buffer.reserve(131_072, pinned=False)
    assert [slab.data_ptr() for slab in buffer._slabs] == [first]
    buffer.reserve(200_000, pinned=False)
    assert [len(slab) for slab in buffer._slabs] == [131_072, 131_072]
    assert buffer._slabs[0].data_ptr() == first


def test_tensors_that_are_read_own_their_memory() -> None:
    data = safetensors.torch.save({"a": torch.ones(4), "b": torch.ones(4)})
    read, _ = read_tensors(io.BytesIO(data), len(data), "x")
    assert {tensor.untyped_storage().nbytes() for tensor in read.values()} == {16}


@pytest.mark.parametrize(
    ("entries", "data", "words"),
    [
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, 8, "impossible offsets"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, 12, "nothing describes its bytes from 0"),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
            12,
            "has 92 bytes where its header describes 88",
        ),
        ({"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}, 8, "impossible offsets"),
        ({"a": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, 8, "'F31'"),
        ({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, 8, "impossible offsets"),
        ({"a": [1]}, 8, "is not a safetensors file"),
        ([], 8, "is not a safetensors file"),
    ],
)
def test_a_header_that_lies_is_refused(entries: Any, data: int, words: str) -> None:
    text = json.dumps(entries).encode().ljust(72)
    whole = len(text).to_bytes(8, "little") + text + bytes(data)
    with pytest.raises(SnapshotError) as caught:
        read_tensors(io.BytesIO(whole), len(whole), "x.safetensors")
    assert str(caught.value).startswith("x.safetensors") and words in str(caught.value)
