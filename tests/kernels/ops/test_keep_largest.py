"""keep_largest against a plain sort, and what it does with ties, NaN and bad input."""

from __future__ import annotations

import math

import pytest
import torch

from fakes.accuracy import largest_by_sorting
from lightning_aigc_kernels.keep_largest import keep_largest, keep_largest_per_head

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", [1.0, 0.999, 0.5, 0.37, 0.01, 1e-9])
@pytest.mark.parametrize("length", [1, 7, 100])
def test_each_row_keeps_its_largest(length: int, density: float, dtype: torch.dtype) -> None:
    rows = torch.randn(5, length, dtype=torch.float64).to(dtype)
    before = rows.clone()
    kept = keep_largest(rows, density)
    assert kept.dtype == dtype and torch.equal(kept, largest_by_sorting(rows, density))
    assert torch.equal(rows, before) and kept.data_ptr() != rows.data_ptr()
    if dtype == torch.float64:  # no ties
        assert (kept != 0).sum(1).tolist() == [math.ceil(density * length)] * 5


def test_float64_is_compared_in_float64() -> None:
    """Magnitudes that float32 cannot tell apart, or hold, are in order all the same."""
    close = torch.tensor([[1 + 3e-9, 1 + 1e-9, 1 + 2e-9, 1.0]], dtype=torch.float64)
    assert torch.equal(keep_largest(close, 0.5), torch.tensor([[1 + 3e-9, 0, 1 + 2e-9, 0]], dtype=torch.float64))
    huge = torch.tensor([[1e200, -1e300, 1.0, 1e100]], dtype=torch.float64)
    assert keep_largest(huge, 0.5).tolist() == [[1e200, -1e300, 0, 0]]


def test_ties_stay_together() -> None:
    assert keep_largest(torch.tensor([[1.0, -2.0, 2.0, 0.5]]), 0.25).tolist() == [[0, -2, 2, 0]]
    assert keep_largest(torch.zeros(1, 3), 0.3).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_are_kept_first(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1, math.nan, 3, 2], [4, -math.inf, math.nan, 9], [4, 3, 2, 1]], dtype=dtype)
    kept = keep_largest(rows, 0.25)
    assert kept.isnan().tolist() == [[False, True, False, False], [False, False, True, False], [False] * 4]
    assert kept.nan_to_num(neginf=-1).tolist() == [[0, 0, 0, 0], [0, -1, 0, 0], [4, 0, 0, 0]]


def test_strides_do_not_matter() -> None:
    rows = torch.randn(6, 8)
    assert torch.equal(keep_largest(rows.t(), 0.4), keep_largest(rows.t().contiguous(), 0.4))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_nothing_gives_nothing(shape: tuple[int, int]) -> None:
    assert keep_largest(torch.zeros(shape), 0.5).shape == shape


def test_heads_are_rows() -> None:
    gradient = torch.randn(2, 3, 4, 5).transpose(1, 2)
    kept = keep_largest_per_head(gradient, 0.3)
    assert torch.equal(kept.flatten(2).flatten(0, 1), largest_by_sorting(gradient.flatten(2).flatten(0, 1), 0.3))
    assert (kept != 0).sum((2, 3)).tolist() == [[math.ceil(0.3 * 15)] * 4] * 2


def test_what_does_not_fit_is_named() -> None:
    for density in (0, -0.5, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got .*; use 1 to keep every entry"):
            keep_largest(torch.randn(2, 3), density)
    with pytest.raises(ValueError, match=r"keep_largest wants rows \[R, L\], got \(3,\)"):
        keep_largest(torch.randn(3), 0.5)
