"""The largest magnitudes of each row in Triton, against a sort."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fakes.accuracy import largest_by_sorting
from lightning_aigc_kernels.keep_largest.kernel import keep_largest

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("density", [0.9, 0.5, 0.01, 1e-9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "length"), [(7, 331), (2, 64), (3, 1), (1, 1000)])
def test_keeps_exactly_what_a_sort_keeps(
    rows: int, length: int, dtype: torch.dtype, density: float, device: torch.device
) -> None:
    rows_RL = torch.randn(rows, length).to(dtype).to(device)
    assert_same_bits(keep_largest(rows_RL, density), largest_by_sorting(rows_RL, density))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_magnitudes_of_every_binade_are_told_apart(dtype: torch.dtype, device: torch.device) -> None:
    # Subnormals to the largest finite number; float32's own subnormals are left out, since chips flush them to zero.
    exponents = torch.linspace(-126 if dtype != torch.float16 else -24, 127 if dtype != torch.float16 else 15, 200)
    row = (torch.exp2(exponents) * torch.tensor([1.0, -1.0]).repeat(100)).to(dtype)[torch.randperm(200)]
    row = row[None].to(device)
    for density in (0.05, 0.5, 0.95):
        assert_same_bits(keep_largest(row, density), largest_by_sorting(row, density))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_magnitudes_one_bit_apart_are_told_apart(dtype: torch.dtype, device: torch.device) -> None:
    as_integer = torch.int32 if dtype == torch.float32 else torch.int16
    infinity = int(torch.tensor(math.inf, dtype=dtype).view(as_integer))
    one = int(torch.tensor(1.0, dtype=dtype).view(as_integer))
    for first in (infinity - 199, one - 100):  # the largest finite numbers with infinity; both sides of 1
        row = torch.arange(first, first + 200, dtype=as_integer).view(dtype)[torch.randperm(200)][None].to(device)
        for density in (0.005, 0.01, 0.5, 0.995):
            kept = keep_largest(row, density)
            assert_same_bits(kept, largest_by_sorting(row, density))
            assert int((kept != 0).sum()) == math.ceil(density * 200)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_are_all_kept(dtype: torch.dtype, device: torch.device) -> None:
    row = torch.tensor([[1.0, -3.0, 2.0, -2.0, 2.0, 0.5, 3.0, 0.0]], dtype=dtype, device=device)
    assert keep_largest(row, 3 / 8).tolist() == [[0.0, -3.0, 2.0, -2.0, 2.0, 0.0, 3.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_are_the_largest_and_stay(dtype: torch.dtype, device: torch.device) -> None:
    rows = torch.tensor(
        [[1.0, math.nan, 2.0, -math.inf, 0.5, 3.0], [math.nan, math.nan, 2.0, 1.0, 0.5, math.inf]],
        dtype=dtype,
        device=device,
    )
    for density in (1 / 6, 0.5, 5 / 6):
        assert_same_bits(keep_largest(rows, density), largest_by_sorting(rows, density))


def test_rows_of_zeros_stay_zeros(device: torch.device) -> None:
    rows = torch.zeros(2, 100, device=device)
    rows[1, 3] = 1.0
    assert torch.equal(keep_largest(rows, 0.5), rows)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_an_empty_tensor_stays_empty(shape: tuple[int, int], device: torch.device) -> None:
    assert keep_largest(torch.ones(shape, device=device), 0.5).shape == shape


def test_density_1_copies(device: torch.device) -> None:
    rows = torch.randn(3, 70).to(device)
    kept = keep_largest(rows, 1.0)
    assert torch.equal(kept, rows) and kept.data_ptr() != rows.data_ptr()


def test_what_cannot_be_served_is_refused_with_the_reason(device: torch.device) -> None:
    rows = torch.ones(4, 6, device=device)
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 1.5; use 1 to keep every number"):
        keep_largest(rows, 1.5)
    with pytest.raises(ValueError, match=r"rows must be contiguous \[R, L\], got \(6, 4\)"):
        keep_largest(rows.T, 0.5)
