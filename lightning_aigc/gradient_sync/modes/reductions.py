"""Reductions: the sum of one flat vector over the ranks, exact, in bfloat16, or in few-bit integers.

A reduction is a generator: it yields each collective it starts and resumes when that collective is done, so that an
executor decides what runs meanwhile. Its input is e, this rank's share of the mean gradient plus its residual. It
returns the sum over the ranks, bit-identical on every rank, and a number that is finite when the sum is. The part that
was not sent stays in e as the next residual: the sum of all e before equals the result plus the sum of all e after.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_aigc.gradient_sync.transport.collectives import CountedGroup
from lightning_aigc.gradient_sync.units import FlatUnit
from lightning_aigc_kernels.quantize_blocks import (
    GROUP,
    add_quantized_rows,
    dequantize_blocks,
    packed_bytes,
    quantize_blocks,
)

Reducing = Generator[Any, None, tuple[Tensor, Tensor]]


class Reduction:
    """Reduction of a unit in one mode. Its state, if it has any, changes only in `commit`, after a finite step."""

    def reduce(self, unit: FlatUnit, e_N: Tensor, group: CountedGroup) -> Reducing:
        raise NotImplementedError

    def observe(self, unit: FlatUnit, total_N: Tensor) -> None:
        """Learn from a sum that was sent uncompressed, in a warm-up step."""

    def commit(self) -> None:
        """Keep the step's changes."""

    def rollback(self) -> None:
        """Drop the step's changes, because it was not finite."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what a run in the same mode saved."""


class Quantizer(Protocol):
    """Packs float32 rows, whose length is a multiple of `multiple`, into uint8 rows of `wire_bytes`.

    Dimensions: R rows of N values, each packed into B bytes; one row is sent to one rank.
    """

    multiple: int

    def wire_bytes(self, length: int) -> int: ...

    def encode_(self, values_RN: Tensor, wire_RB: Tensor) -> None:
        """Write values_RN into wire_RB, and leave the rounding error in values_RN."""

    def decode(self, wire_RB: Tensor, out_RN: Tensor) -> Tensor:
        """Write the values of wire_RB to out_RN. Returns: a number that is finite when every value is."""
        ...

    def add_rows_(self, wire_RB: Tensor, out_N: Tensor) -> None:
        """Add the values of all rows of wire_RB to out_N."""


class BlockQuantizer:
    """Quantizer to blocks of integers of 3, 4 or 8 bits that share a scale, by the op `quantize_blocks`.

    A value that is not finite makes its block's scale infinite, and so every decoded value of the block.
    """

    multiple = GROUP

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def wire_bytes(self, length: int) -> int:
        return packed_bytes(length, self.bits)

    def encode_(self, values_RN: Tensor, wire_RB: Tensor) -> None:
        quantize_blocks(values_RN, wire_RB, self.bits)

    def decode(self, wire_RB: Tensor, out_RN: Tensor) -> Tensor:
        return dequantize_blocks(wire_RB, out_RN, self.bits)

    def add_rows_(self, wire_RB: Tensor, out_N: Tensor) -> None:
        add_quantized_rows(wire_RB, out_N, self.bits)


class Uncompressed(Reduction):
    """Sends everything in float32."""

    def reduce(self, unit: FlatUnit, e_N: Tensor, group: CountedGroup) -> Reducing:
        total = e_N.clone()
        yield group.all_reduce(total, unit.kind)
        e_N.zero_()
        return total, total.sum()


class BFloat16(Reduction):
    """Sends everything in bfloat16; partial sums round to it as well, and that rounding is lost."""

    def reduce(self, unit: FlatUnit, e_N: Tensor, group: CountedGroup) -> Reducing:
        total = yield from in_bfloat16(e_N, group, unit.kind)
        return total.float(), total.sum(dtype=torch.float32)


class Quantized(Reduction):
    """Sends blocks of few-bit integers in two hops, both with error feedback."""

    def __init__(self, bits: int) -> None:
        self.quantizer = BlockQuantizer(bits)

    def reduce(self, unit: FlatUnit, e_N: Tensor, group: CountedGroup) -> Reducing:
        result = yield from in_two_hops(e_N, self.quantizer, group, unit.kind)
        return result


def run_alone(reducing: Reducing) -> tuple[Tensor, Tensor]:
    """Run a reduction to its end, each collective after the other. Returns: what it returns."""
    while True:
        try:
            next(reducing).wait()
        except StopIteration as end:
            result: tuple[Tensor, Tensor] = end.value
            return result


def in_bfloat16(e_N: Tensor, group: CountedGroup, kind: str = "values") -> Generator[Any, None, Tensor]:
    """Return the sum in bfloat16; the rounding error stays in e_N."""
    wire = e_N.bfloat16()
    e_N.sub_(wire)
    yield group.all_reduce(wire, kind)
    return wire


def in_two_hops(e_N: Tensor, quantizer: Quantizer, group: CountedGroup, kind: str = "values") -> Reducing:
    """Return the sum of e_N in two quantized hops: shards to the rank that adds them, and the sums back.

    A rank's own shard is not quantized in the first hop; there e_N takes the error of the second hop, so one vector
    holds the residual of both. N must be a multiple of the group's size times `quantizer.multiple`.
    """
    e_RN = e_N.view(group.size, -1)
    nbytes = quantizer.wire_bytes(e_RN.shape[1])
    out_RB, received_RB = (torch.empty(group.size, nbytes, dtype=torch.uint8, device=e_N.device) for _ in range(2))
    others = [slice(0, group.rank), slice(group.rank + 1, group.size)]
    for rows in others:
        quantizer.encode_(e_RN[rows], out_RB[rows])
    yield group.all_to_all(received_RB.view(-1), out_RB.view(-1), kind)  # no rank reads its own row

    mine_1N = e_RN[group.rank : group.rank + 1]
    for rows in others:
        quantizer.add_rows_(received_RB[rows], mine_1N[0])
    sum_1B = torch.empty(1, nbytes, dtype=torch.uint8, device=e_N.device)
    quantizer.encode_(mine_1N, sum_1B)
    yield group.all_gather(received_RB.view(-1), sum_1B.view(-1), kind)

    total_RN = torch.empty_like(e_RN)
    check = quantizer.decode(received_RB, total_RN)
    return total_RN.view(-1), check
