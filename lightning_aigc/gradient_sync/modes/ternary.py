"""Mode ternary: the gradient is rotated, and each value becomes -1, 0 or 1 times its block's root mean square.

The rotation, a Hadamard transform behind random signs, spreads each value over its block, so that all blocks look
Gaussian and no value is always below the threshold. The rounding error is dropped: with error feedback a small
denoiser lost more (benchmarks/studies/few_bits.py). Sources: Suresh et al., arXiv:1611.00429, for the rotation;
Wen et al., TernGrad, arXiv:1705.07878; Max, Quantizing for minimum distortion, 1960, for the threshold.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_aigc.gradient_sync.modes.reductions import Reducing, Reduction, in_two_hops
from lightning_aigc.gradient_sync.transport.collectives import CountedGroup
from lightning_aigc.gradient_sync.units import FlatUnit

SIDE = 16
BLOCK = SIDE * SIDE
"""Values that are rotated together and share a scale."""
PER_BYTE = 5
"""Values of three levels in a byte: 3^5 = 243."""
CODE_BYTES = -(-BLOCK // PER_BYTE)
SCALE_BYTES = 2
"""A scale is a bfloat16: the block's root mean square."""
THRESHOLD, LEVEL = 0.6120, 1.5111
"""Threshold and level in root mean squares. Max's threshold for a Gaussian, and the level at which the result is
unbiased: Max's level over 0.81, the part of a value that his keeps on average."""
CPU_CHUNK = 1_048_576
"""Values per chunk on a CPU."""


class TernaryQuantizer:
    """Quantizer to three levels, five values a byte."""

    multiple = BLOCK

    def wire_bytes(self, length: int) -> int:
        return length // BLOCK * (SCALE_BYTES + CODE_BYTES)

    def encode_(self, values_RN: Tensor, wire_RB: Tensor) -> None:
        for values, scales, codes in self._chunks(values_RN, wire_RB):
            size = values.square().mean(-1).sqrt_().bfloat16()
            scales.copy_(size)
            size = size.float()[..., None]
            signs = values.sign().mul_(values.abs() > THRESHOLD * size)
            values.addcmul_(signs, size, value=-LEVEL)
            digits = torch.ones(*scales.shape, PER_BYTE * CODE_BYTES, dtype=torch.uint8, device=values.device)
            digits[..., :BLOCK] = signs + 1
            digits = torch.unflatten(digits, -1, (PER_BYTE, CODE_BYTES))
            packed = digits[..., PER_BYTE - 1, :]
            for place in range(PER_BYTE - 2, -1, -1):
                packed = torch.add(digits[..., place, :], packed, alpha=3)
            codes.copy_(packed)

    def decode(self, wire_RB: Tensor, out_RN: Tensor) -> Tensor:
        check = out_RN.new_zeros(())
        for values, scales, codes in self._chunks(out_RN, wire_RB):
            torch.mul(self._signs(codes), LEVEL * scales.float()[..., None], out=values)
            check = check + scales.sum(dtype=torch.float32)
        return check

    def add_rows_(self, wire_RB: Tensor, out_N: Tensor) -> None:
        if len(wire_RB) == 0:
            return
        every_row = out_N.expand(len(wire_RB), -1)
        for values, scales, codes in self._chunks(every_row, wire_RB):
            values[0].add_(self._signs(codes).mul_(LEVEL * scales.float()[..., None]).sum(0))

    def _chunks(self, values_RN: Tensor, wire_RB: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return blocks [R, n, BLOCK], scales [R, n] and codes [R, n, CODE_BYTES]; on an accelerator all at once."""
        blocks = torch.unflatten(values_RN, 1, (-1, BLOCK))
        count = blocks.shape[1]
        scales = wire_RB[:, : count * SCALE_BYTES].view(torch.bfloat16)
        codes = torch.unflatten(wire_RB[:, count * SCALE_BYTES :], 1, (-1, CODE_BYTES))
        size = CPU_CHUNK // BLOCK if values_RN.device.type == "cpu" else max(1, count)
        return list(zip(*(torch.split(part, size, dim=1) for part in (blocks, scales, codes)), strict=True))

    def _signs(self, codes: Tensor) -> Tensor:
        """Return -1, 0 or 1 for each value, float32 [R, n, BLOCK]."""
        digits = torch.empty(*codes.shape[:2], PER_BYTE, CODE_BYTES, dtype=torch.uint8, device=codes.device)
        for place in range(PER_BYTE):
            above = codes // 3
            torch.sub(codes, above, alpha=3, out=digits[:, :, place])
            codes = above
        return digits.flatten(2)[..., :BLOCK].float() - 1


class Ternary(Reduction):
    """Sends a rotated gradient in three levels, in two hops, and drops their rounding error."""

    def __init__(self, device: torch.device) -> None:
        self.quantizer = TernaryQuantizer()
        generator = torch.Generator().manual_seed(0)  # the same signs on every rank
        self._signs = (torch.randint(0, 2, (BLOCK,), generator=generator) * 2.0 - 1).to(device)
        self._hadamard = hadamard(SIDE).to(device)

    def reduce(self, unit: FlatUnit, e_N: Tensor, group: CountedGroup) -> Reducing:
        rotated_N = self._turned((e_N.view(-1, BLOCK) * self._signs).view(-1, SIDE, SIDE)).view(-1)
        e_N.zero_()
        total_N, check = yield from in_two_hops(rotated_N, self.quantizer, group, unit.kind)
        back = self._turned(total_N.view(-1, SIDE, SIDE)).view(-1, BLOCK)
        return back.mul_(self._signs).view(-1), check

    def _turned(self, blocks: Tensor) -> Tensor:
        """Return each SIDE x SIDE block times the Hadamard matrix of its values, which is its own inverse."""
        return self._hadamard @ blocks @ self._hadamard


def hadamard(size: int) -> Tensor:
    """Return the orthogonal, symmetric Hadamard matrix, float32 [size, size]; size is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)
