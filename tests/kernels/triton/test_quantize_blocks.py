"""Quantized blocks in Triton, against the torch reference, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fakes.models.hard_blocks import bits_of, hard_blocks
from lightning_aigc_kernels.quantize_blocks import kernel, packed_bytes, reference

BITS = (3, 4, 8)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")  # NumPy's


def rows(count: int) -> Tensor:
    """Rows with every difficulty, whose groups do not fill a tile."""
    return torch.cat([hard_blocks(seed).view(1, -1) for seed in range(count)])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("bits", BITS)
def test_the_bits_are_the_reference_s(bits: int, count: int, device: torch.device) -> None:
    values_RN = rows(count).to(device)
    found = []
    for of in (kernel, reference):
        left_RN = values_RN.clone()
        packed_RB = torch.full((count, packed_bytes(values_RN.shape[1], bits)), 255, dtype=torch.uint8, device=device)
        of.quantize_blocks(left_RN, packed_RB, bits)
        read_RN = torch.full_like(values_RN, torch.nan)
        check = of.dequantize_blocks(packed_RB, read_RN, bits)
        added_N = torch.linspace(-1, 1, values_RN.shape[1]).to(device)
        of.add_quantized_rows(packed_RB, added_N, bits)
        found.append([packed_RB, *(bits_of(each) for each in (left_RN, read_RN, added_N, check.view(1)))])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_stays_nothing(device: torch.device) -> None:
    for shape in ((0, 256), (2, 0)):
        values_RN = torch.ones(shape, device=device)
        packed_RB = torch.empty(shape[0], packed_bytes(shape[1], 3), dtype=torch.uint8, device=device)
        kernel.quantize_blocks(values_RN, packed_RB, 3)
