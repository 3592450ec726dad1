"""Blocks of a few-bit integers with one scale each: 3, 4 or 8 bits a value, packed to bytes.

A block's entry of largest magnitude becomes the lowest integer exactly, so that no level is spared on its side: with
h = 2^(bits-1), scale = -extreme / h and the integers run from -h to h - 1. A value that is not finite makes its block's
scale so, and with it every value that is read back.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Values that share a scale: smaller blocks cost bytes, larger ones lose their small values."""
SCALE_BYTES = 2
"""A scale is a bfloat16: it has float32's range and knows NaN."""
PLANES = {8: (8,), 4: (4,), 3: (2, 1)}
"""How many bits of a value each plane of the packed bytes holds."""
CPU_CHUNK = 262_144
"""Values that a CPU takes at a time: few enough to stay in its cache from pass to pass, and whole blocks."""
TINY = 1e-30
"""A block whose scale is below this is all zeros: its inverse would overflow."""


class BlockIntegers:
    """Packs float32 vectors, whose length divides by `multiple`, into uint8 vectors of `wire_bytes`."""

    multiple = 256

    def __init__(self, bits: int) -> None:
        self.bits, self.half = bits, 2 ** (bits - 1)

    def wire_bytes(self, length: int) -> int:
        return length // BLOCK * SCALE_BYTES + length * self.bits // 8

    def encode_(self, values_N: Tensor, wire: Tensor) -> None:
        """Write values_N into `wire`, and leave in values_N what the wire does not say of them."""
        scales, codes = self._parts(values_N.numel(), wire)
        for start, stop in self._chunks(values_N):
            chunk = values_N[start:stop].view(-1, BLOCK)
            highest, lowest = chunk.amax(1, keepdim=True), chunk.amin(1, keepdim=True)
            extreme = torch.where(highest > -lowest, highest, lowest)
            # A NaN compares as false: amax and amin are both NaN then, and so is the extreme.
            scale = scales[start // BLOCK : stop // BLOCK].view(-1, 1).copy_(extreme.mul_(-1 / self.half)).float()
            scale.masked_fill_(scale.abs() < TINY, 0)
            inverse = scale.reciprocal().masked_fill_(scale == 0, 0)
            integers = torch.mul(chunk, inverse).round_().clamp_(-self.half, self.half - 1)
            chunk.addcmul_(integers, scale, value=-1)
            self._pack(integers.add_(self.half).to(torch.uint8).view(-1), codes[self._code_range(start, stop)])

    def decode(self, wire: Tensor, out_N: Tensor, *, add: bool = False) -> Tensor:
        """Write, or add, the values of `wire` to out_N.

        Returns: a number that is finite when every value is.
        """
        scales, codes = self._parts(out_N.numel(), wire)
        for start, stop in self._chunks(out_N):
            scale = scales[start // BLOCK : stop // BLOCK].view(-1, 1).float()
            scale.masked_fill_(scale.abs() < TINY, 0)
            integers = self._unpack(codes[self._code_range(start, stop)], stop - start).to(torch.float32)
            integers = integers.sub_(self.half).view(-1, BLOCK)
            chunk = out_N[start:stop].view(-1, BLOCK)
            chunk.addcmul_(integers, scale) if add else torch.mul(integers, scale, out=chunk)
        return scales.sum(dtype=torch.float32)

    def _parts(self, length: int, wire: Tensor) -> tuple[Tensor, Tensor]:
        split = length // BLOCK * SCALE_BYTES
        return wire[:split].view(torch.bfloat16), wire[split:]

    def _chunks(self, values_N: Tensor) -> list[tuple[int, int]]:
        length = values_N.numel()
        step = CPU_CHUNK if values_N.device.type == "cpu" else max(length, 1)
        return [(start, min(start + step, length)) for start in range(0, length, step)]

    def _code_range(self, start: int, stop: int) -> slice:
        return slice(start * self.bits // 8, stop * self.bits // 8)

    def _pack(self, values_N: Tensor, codes: Tensor) -> None:
        """Each plane puts the values of 8 / plane equal stretches side by side into its bytes."""
        at, shift = 0, 0
        for plane in PLANES[self.bits]:
            together = 8 // plane
            size = values_N.numel() // together
            part = values_N
            if plane != self.bits:
                part = torch.bitwise_and(torch.bitwise_right_shift(values_N, shift), 2**plane - 1)
            stretches = part.view(together, size)
            out = codes[at : at + size]
            out.copy_(stretches[0])
            for i in range(1, together):
                out.add_(stretches[i], alpha=2 ** (plane * i))
            at, shift = at + size, shift + plane

    def _unpack(self, codes: Tensor, length: int) -> Tensor:
        if self.bits == 8:
            return codes
        values_N: Tensor | None = None
        at, shift = 0, 0
        for plane in PLANES[self.bits]:
            together = 8 // plane
            size = length // together
            shifts = torch.arange(0, 8, plane, dtype=torch.uint8, device=codes.device).view(-1, 1)
            part = torch.bitwise_right_shift(codes[at : at + size], shifts).bitwise_and_(2**plane - 1).view(-1)
            values_N = part if values_N is None else values_N.add_(part, alpha=2**shift)
            at, shift = at + size, shift + plane
        assert values_N is not None
        return values_N
