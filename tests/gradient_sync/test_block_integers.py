"""Few-bit integers: how far off, what is left over, and what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_aigc.gradient_sync.block_integers import BLOCK, CPU_CHUNK, TINY, BlockIntegers

BITS = (8, 4, 3)
LENGTHS = (256, 512, 256 * 7, CPU_CHUNK, CPU_CHUNK + 256, 2 * CPU_CHUNK + 768)


def round_trip(bits: int, values_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is read back, what is left, and the check; into memory that held NaN and ones."""
    code = BlockIntegers(bits)
    left_N, out_N = values_N.clone(), torch.full_like(values_N, torch.nan)
    wire = torch.full((code.wire_bytes(len(values_N)),), 255, dtype=torch.uint8)
    code.encode_(left_N, wire)
    check = code.decode(wire, out_N)
    return out_N, left_N, check


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bits", BITS)
def test_a_value_is_off_by_half_a_level_and_the_far_end_by_one(bits: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    values_N = torch.randn(length, generator=generator) * 10 ** torch.empty(length).uniform_(-3, 3, generator=generator)
    out_N, _, check = round_trip(bits, values_N)
    blocks = values_N.view(-1, BLOCK)
    extreme = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    level = extreme.abs() / 2 ** (bits - 1)
    error = (out_N - values_N).view(-1, BLOCK).abs() - extreme.abs() * 2.0**-8  # a scale is rounded to 8 bits
    assert (error <= level).all()
    inside = blocks * -extreme.sign() <= level * (2 ** (bits - 1) - 1)  # the highest level is one short of the lowest
    assert (error <= level / 2)[inside].all()
    assert math.isfinite(check)


@pytest.mark.parametrize("bits", BITS)
def test_what_is_read_and_what_is_left_is_what_was_given(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    values_N = torch.randint(-(2**11), 2**11, (256 * 9,), generator=generator).float() / 2**7
    out_N, left_N, _ = round_trip(bits, values_N)
    assert torch.equal(out_N + left_N, values_N)
    assert left_N.any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_level_survives_at_every_place(bits: int, length: int) -> None:
    half = 2 ** (bits - 1)
    levels = torch.arange(length).mul(7).remainder(2 * half).sub(half).float()
    levels.view(-1, BLOCK)[:, 0] = -half  # the extreme that sets a scale of 1
    out_N, left_N, _ = round_trip(bits, levels)
    assert torch.equal(out_N, levels) and not left_N.any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_block_and_shows_in_the_check(bits: int, value: float) -> None:
    values_N = torch.linspace(-1, 1, 512)
    clean, _, _ = round_trip(bits, values_N)
    values_N[300] = value
    out_N, _, check = round_trip(bits, values_N)
    block = slice(300 // BLOCK * BLOCK, 300 // BLOCK * BLOCK + BLOCK)
    assert not out_N[block].isfinite().any()
    assert torch.equal(out_N[: block.start], clean[: block.start]) and torch.equal(
        out_N[block.stop :], clean[block.stop :]
    )
    assert not math.isfinite(check)


@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_what_is_smaller_than_any_scale_are_left_alone(bits: int) -> None:
    values_N = torch.zeros(512)
    values_N[256:] = TINY / 4
    out_N, left_N, _ = round_trip(bits, values_N)
    assert not out_N.any() and torch.equal(left_N, values_N)


@pytest.mark.parametrize("bits", BITS)
def test_tiny_and_huge_blocks_keep_their_size(bits: int) -> None:
    for size in (1e-27, 1e30):
        values_N = torch.linspace(-1, 1, 256) * size
        out_N, left_N, _ = round_trip(bits, values_N)
        torch.testing.assert_close(out_N + left_N, values_N, rtol=1e-6, atol=0)
        assert (out_N[0] / values_N[0] - 1).abs() < 2.0**-8


@pytest.mark.parametrize("bits", BITS)
def test_adding_adds(bits: int) -> None:
    code, values_N, start_N = BlockIntegers(bits), torch.linspace(-2, 3, 768), torch.linspace(1, 2, 768)
    wire = torch.empty(code.wire_bytes(768), dtype=torch.uint8)
    code.encode_(values_N.clone(), wire)
    alone_N, added_N = torch.empty(768), start_N.clone()
    code.decode(wire, alone_N)
    code.decode(wire, added_N, add=True)
    assert torch.equal(added_N, start_N + alone_N)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [256, 2560])
def test_the_wire_has_bits_a_value_and_two_bytes_a_block(bits: int, length: int) -> None:
    assert BlockIntegers(bits).wire_bytes(length) == length * bits // 8 + length // 32 * 2
