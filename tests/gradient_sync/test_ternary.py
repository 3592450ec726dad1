"""Mode ternary: its levels, its bytes, and its rotation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_aigc.gradient_sync.modes.ternary import BLOCK, LEVEL, THRESHOLD, TernaryQuantizer, hadamard


def packed(values_RN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decoded values, the rounding error, and the check."""
    quantizer, rounded_off = TernaryQuantizer(), values_RN.clone()
    wire = torch.empty(len(values_RN), quantizer.wire_bytes(values_RN.shape[1]), dtype=torch.uint8)
    quantizer.encode_(rounded_off, wire)
    arrived = torch.empty_like(values_RN)
    return arrived, rounded_off, quantizer.decode(wire, arrived)


def gaussian(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(seed))


def test_a_block_has_three_levels_at_the_threshold_and_the_rest_is_what_was_rounded_off() -> None:
    values = gaussian(2, 3 * BLOCK)
    arrived, rounded_off, _ = packed(values)
    size = values.view(-1, BLOCK).square().mean(1, keepdim=True).sqrt().bfloat16().float()
    wanted = torch.where(
        values.view(-1, BLOCK).abs() > THRESHOLD * size, values.view(-1, BLOCK).sign() * LEVEL * size, 0
    )
    torch.testing.assert_close(arrived.view(-1, BLOCK), wanted)
    torch.testing.assert_close(arrived + rounded_off, values)


def test_gaussian_values_arrive_unbiased() -> None:
    values = gaussian(1, 4096 * BLOCK, seed=7)
    arrived, _, _ = packed(values)
    assert float((values * arrived).sum() / values.square().sum()) == pytest.approx(1, abs=2e-3)


def test_a_value_costs_a_fifth_of_a_byte_and_its_share_of_the_scale() -> None:
    assert TernaryQuantizer().wire_bytes(100 * BLOCK) == 100 * (52 + 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_shows_in_the_check(bad: float) -> None:
    values = gaussian(3, 2 * BLOCK)
    values[1, BLOCK + 5] = bad
    assert not packed(values)[2].isfinite()
    assert packed(torch.zeros(1, BLOCK))[2].isfinite() and not packed(torch.zeros(1, BLOCK))[0].any()


def test_rows_are_added_as_they_decode() -> None:
    values, quantizer = gaussian(3, 5 * BLOCK), TernaryQuantizer()
    wire = torch.empty(3, quantizer.wire_bytes(5 * BLOCK), dtype=torch.uint8)
    quantizer.encode_(values.clone(), wire)
    total = torch.ones(5 * BLOCK)
    quantizer.add_rows_(wire, total)
    torch.testing.assert_close(total, 1 + packed(values)[0].sum(0))


def test_the_rotation_spreads_one_value_evenly_and_is_its_own_inverse() -> None:
    matrix = hadamard(16)
    one = torch.zeros(16, 16)
    one[3, 5] = 1
    turned = matrix @ one @ matrix
    assert torch.equal(turned.abs(), torch.full((16, 16), 1 / 16))
    torch.testing.assert_close(matrix @ turned @ matrix, one)
