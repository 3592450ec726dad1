"""Few-bit integers: how far off, what is left over, and what is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_aigc.gradient_sync.modes.reductions import BlockQuantizer, in_two_hops
from lightning_aigc_kernels.quantize_blocks import BLOCK, op, reference
from lightning_aigc_kernels.quantize_blocks.layout import TINY
from lightning_aigc_kernels.quantize_blocks.reference import CPU_CHUNK

BITS = (8, 4, 3)
LENGTHS = (256, 512, 256 * 7, CPU_CHUNK, CPU_CHUNK + 256, 2 * CPU_CHUNK + 768)


def round_trip(bits: int, values_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decoded values, the error that is left, and the check; into memory that held NaN and ones."""
    code = BlockQuantizer(bits)
    left_N, out_N = values_N.clone(), torch.full_like(values_N, torch.nan)
    wire_1B = torch.full((1, code.wire_bytes(len(values_N))), 255, dtype=torch.uint8)
    code.encode_(left_N.view(1, -1), wire_1B)
    check = code.decode(wire_1B, out_N.view(1, -1))
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


ROWS = {"several rows at a time": (5, 512), "each row in parts": (3, CPU_CHUNK + 256), "one row": (1, 768)}


def rows_of(shape: tuple[int, int]) -> Tensor:
    """Numbers whose size differs from row to row."""
    values_RN = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))
    return values_RN * 10.0 ** torch.arange(shape[0]).view(-1, 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", ROWS)
def test_a_row_is_packed_as_if_it_were_alone(rows: str, bits: int) -> None:
    code, values_RN = BlockQuantizer(bits), rows_of(ROWS[rows])
    left_RN, out_RN = values_RN.clone(), torch.full_like(values_RN, torch.nan)
    wire_RB = torch.full((len(values_RN), code.wire_bytes(values_RN.shape[1])), 255, dtype=torch.uint8)
    code.encode_(left_RN, wire_RB)
    code.decode(wire_RB, out_RN)
    for row, values_N in enumerate(values_RN):
        alone_N, left_N, _ = round_trip(bits, values_N)
        assert torch.equal(out_RN[row], alone_N) and torch.equal(left_RN[row], left_N)
        torch.testing.assert_close(alone_N + left_N, values_N)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", ROWS)
def test_all_rows_are_added_to_what_is_there(rows: str, bits: int) -> None:
    code, values_RN = BlockQuantizer(bits), rows_of(ROWS[rows])
    start_N, out_RN = torch.linspace(1, 2, values_RN.shape[1]), torch.empty_like(values_RN)
    wire_RB = torch.empty(len(values_RN), code.wire_bytes(values_RN.shape[1]), dtype=torch.uint8)
    code.encode_(values_RN, wire_RB)
    code.decode(wire_RB, out_RN)
    added_N = start_N.clone()
    code.add_rows_(wire_RB, added_N)
    torch.testing.assert_close(added_N.double(), start_N.double() + out_RN.double().sum(0), rtol=1e-6, atol=1e-3)


class Counted(TorchDispatchMode):
    """Counts the kernels that an accelerator would launch: operators that are not views, and no memory alone."""

    launches = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launches += not op.is_view and not op.name().startswith("aten::empty")
        return op(*args, **(kwargs or {}))


class Silent:
    """A group whose collectives move nothing."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def all_to_all(self, out: Tensor, tensor: Tensor, kind: str) -> None:
        out.zero_()

    all_gather = all_to_all


def launches_in_two_hops(bits: int, ranks: int) -> int:
    code = BlockQuantizer(bits)
    with Counted() as counted:
        for _ in in_two_hops(torch.ones(ranks * 512), code, Silent(ranks, 2)):  # type: ignore[arg-type]
            pass
    return counted.launches


@pytest.mark.parametrize(("bits", "at_most"), [(8, 96), (4, 138), (3, 138)])
def test_an_accelerator_launches_as_many_kernels_on_any_number_of_ranks(
    bits: int, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "CPU_CHUNK", 2**40)  # an accelerator takes everything at once
    few, many = launches_in_two_hops(bits, 8), launches_in_two_hops(bits, 384)
    assert few <= at_most and many - few == 384 - 8  # without Triton each row is added by itself


@pytest.mark.parametrize("bits", BITS)
def test_triton_launches_a_kernel_for_each_side_of_a_rank_s_row(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows before a rank's own and after it are packed and added each; then its sum is packed, and all is read."""
    calls = []

    class StandIn:
        def quantize_blocks(self, values_RN: Tensor, packed_RB: Tensor, bits: int) -> None:
            calls.append("quantize")

        def add_quantized_rows(self, packed_RB: Tensor, out_N: Tensor, bits: int) -> None:
            calls.append("add")

        def dequantize_blocks(self, packed_RB: Tensor, out_RN: Tensor, bits: int) -> Tensor:
            calls.append("dequantize")
            return torch.zeros(())

    monkeypatch.setattr(op, "_implementation", lambda values: StandIn())
    launches = launches_in_two_hops(bits, 384)
    assert launches <= 4, "the test's own: the vector, and what the silent group clears"
    assert calls == ["quantize", "quantize", "add", "add", "quantize", "dequantize"]


def test_a_cpu_takes_small_rows_together_and_large_ones_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks(rows: int, length: int) -> list[tuple[slice, slice]]:
        return list(reference._chunks((rows, length), torch.device("cpu")))

    monkeypatch.setattr(reference, "CPU_CHUNK", 1024)
    assert chunks(5, 512) == [(slice(r, r + 2), slice(0, 2)) for r in (0, 2, 4)]
    assert chunks(2, 1280) == [(slice(r, r + 1), at) for r in (0, 1) for at in (slice(0, 4), slice(4, 5))]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [256, 2560])
def test_the_wire_has_bits_a_value_and_two_bytes_a_block(bits: int, length: int) -> None:
    assert BlockQuantizer(bits).wire_bytes(length) == length * bits // 8 + length // 32 * 2
