"""The cache of packed weights: equal bytes from disk, keyed by content, whole under races and damage."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_aigc.diffusion.pipeline.quantized_base import PackedCache, content_key
from lightning_aigc.quantization.layers import Layer


def make_layer(seed: int = 0) -> Layer:
    torch.manual_seed(seed)
    return Layer("proj", nn.Linear(80, 90).to(torch.bfloat16).requires_grad_(False))


def test_a_second_run_reads_the_same_bytes_and_int8_needs_no_file(tmp_path: Path) -> None:
    first, second = PackedCache(tmp_path), PackedCache(tmp_path)
    assert first.pack(make_layer(), "int8").kind == "int8" and not list(tmp_path.iterdir())
    made, read = first.pack(make_layer(), "nf4"), second.pack(make_layer(), "nf4")
    assert (first.hits, first.misses, second.hits, second.misses) == (0, 1, 1, 0)
    assert torch.equal(made.packed, read.packed) and torch.equal(made.scales, read.scales)
    assert made.dtype == read.dtype == torch.bfloat16 and torch.equal(made.dequantize(), read.dequantize())


def test_other_numbers_dtypes_shapes_and_formats_have_other_keys() -> None:
    weight = make_layer().weight
    changed = weight.clone()
    changed[40, 40] += 1
    keys = {content_key(weight, "int8"), content_key(weight, "nf4"), content_key(changed, "int8"),
            content_key(weight.view(90, 40, 2), "int8"), content_key(weight.view(torch.float16), "int8")}  # fmt: skip
    assert len(keys) == 5
    assert content_key(weight.clone(), "int8") in keys


def test_a_damaged_file_is_packed_again_and_mended(tmp_path: Path) -> None:
    made = PackedCache(tmp_path).pack(make_layer(), "nf4")
    (path,) = tmp_path.rglob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    cache = PackedCache(tmp_path)
    again = cache.pack(make_layer(), "nf4")
    assert cache.misses == 1 and torch.equal(again.packed, made.packed)
    mended = PackedCache(tmp_path)
    mended.pack(make_layer(), "nf4")
    assert mended.hits == 1


def test_many_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    found, layer = [], make_layer()
    threads = [threading.Thread(target=lambda: found.append(PackedCache(tmp_path).pack(layer, "nf4")))
               for _ in range(6)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(list(tmp_path.rglob("*.safetensors"))) == 1 and not list(tmp_path.rglob("*.part"))
    cache = PackedCache(tmp_path)
    cache.pack(make_layer(), "nf4")
    assert cache.hits == 1


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = PackedCache(tmp_path / "file" / "packed")
    with pytest.warns(UserWarning, match="packed weights are not cached"):
        cache.pack(make_layer(), "nf4")
    cache.pack(make_layer(1), "nf4")  # warned once
    assert cache.misses == 2
