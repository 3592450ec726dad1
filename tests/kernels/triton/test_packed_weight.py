"""Unpacking in Triton, bit for bit as in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_aigc_kernels.packed_weight import Format, kernel, reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def expected(packed: Tensor, scales: Tensor, kind: Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The reference's numbers; Triton's interpreter cuts float32 off to bfloat16, where chips and torch round."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        exact = reference.unpack(packed, scales, kind, torch.float32)
        return (exact.view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return reference.unpack(packed, scales, kind, dtype)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [64, 63, 64 * 3, 64 * 37 + 5])
def test_the_numbers_are_the_references(numel: int, dtype: torch.dtype, kind: Format, device: torch.device) -> None:
    packed, scales = reference.pack(torch.randn(numel) * 0.02, kind)
    ours = kernel.unpack(packed.to(device), scales.to(device), kind, dtype)
    assert torch.equal(ours.cpu(), expected(packed, scales, kind, dtype, device))


def test_every_byte_of_nf4_is_read(device: torch.device) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.linspace(0.1, 3, 8)
    ours = kernel.unpack(packed.to(device), scales.to(device), "nf4", torch.float32)
    assert torch.equal(ours.cpu(), reference.unpack(packed, scales, "nf4", torch.float32))


@pytest.mark.parametrize("table", ["cuda", "npu"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_tiles_of_real_chips_give_the_same(
    kind: Format, table: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernel.CONFIGS, device.type, kernel.CONFIGS[table])
    packed, scales = reference.pack(torch.randn(64 * 150), kind)
    ours = kernel.unpack(packed.to(device), scales.to(device), kind, torch.bfloat16)
    assert torch.equal(ours.cpu(), expected(packed, scales, kind, torch.bfloat16, device))


def test_an_empty_weight_is_empty_and_a_wrong_shape_is_named(device: torch.device) -> None:
    packed, scales = torch.empty(0, 32, dtype=torch.uint8, device=device), torch.empty(0, device=device)
    assert kernel.unpack(packed, scales, "nf4", torch.float32).shape == (0,)
    with pytest.raises(ValueError, match=r"int8 wants contiguous bytes \[B, 64\] and scales \[B\], got \(0, 32\)"):
        kernel.unpack(packed, scales, "int8", torch.float32)
