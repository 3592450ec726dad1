"""Quantization: blocks of integers of 3, 4 or 8 bits that share a scale, packed to bytes.

A block's entry of largest magnitude becomes the lowest integer exactly, so that no level is unused on its side: with
h = 2^(bits-1), scale = -extreme / h and the integers run from -h to h - 1. A value that is not finite makes its block's
scale not finite, and with it every value that is decoded.

Dimensions: R rows of N values, each packed into B bytes; a row is what goes to one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


class BlockQuantizer:
    """Packs float32 rows, whose length divides by `multiple`, into uint8 rows of `wire_bytes`.

    An accelerator takes all rows at once: what counts there is how many kernels are launched, not for how many rows.
    """

    multiple = 256

    def __init__(self, bits: int) -> None:
        self.bits, self.half = bits, 2 ** (bits - 1)
        self._shifts: dict[torch.device, list[Tensor]] = {}

    def wire_bytes(self, length: int) -> int:
        return length // BLOCK * SCALE_BYTES + length * self.bits // 8

    def encode_(self, values_RN: Tensor, wire_RB: Tensor) -> None:
        """Write values_RN into wire_RB, and leave the quantization error in values_RN."""
        for rows, places in self._chunks(values_RN.shape, values_RN.device):
            chunk = values_RN[rows, places].view(-1, BLOCK)
            highest, lowest = chunk.amax(1, keepdim=True), chunk.amin(1, keepdim=True)
            extreme = torch.where(highest > -lowest, highest, lowest)
            # A NaN compares as false: amax and amin are both NaN then, and so is the extreme.
            scale = extreme.mul_(-1 / self.half).bfloat16()
            is_tiny = scale.abs() < TINY
            scales, codes = self._parts(wire_RB[rows], places)
            scales.copy_(scale.masked_fill_(is_tiny, 0).view(scales.shape))
            scale = scale.float()
            inverse = scale.reciprocal().masked_fill_(is_tiny, 0)
            integers = torch.mul(chunk, inverse).round_().clamp_(-self.half, self.half - 1)
            chunk.addcmul_(integers, scale, value=-1)
            self._pack(integers.add_(self.half).view(len(codes), -1), codes)

    def decode(self, wire_RB: Tensor, out_RN: Tensor) -> Tensor:
        """Write the values of wire_RB to out_RN.

        Returns: a number that is finite when every value is.
        """
        for rows, places in self._chunks(out_RN.shape, out_RN.device):
            integers, scale = self._unpack(wire_RB[rows], places)
            torch.mul(integers, scale, out=out_RN[rows, places].view(-1, BLOCK))
        scales, _ = self._parts(wire_RB, slice(0, out_RN.shape[1]))
        return scales.sum(dtype=torch.float32)

    def add_rows_(self, wire_RB: Tensor, out_N: Tensor) -> None:
        """Add the values of all rows of wire_RB to out_N."""
        for rows, places in self._chunks((len(wire_RB), len(out_N)), out_N.device):
            integers, scale = self._unpack(wire_RB[rows], places)
            out = out_N[places].view(-1, BLOCK)
            if len(integers) == len(out):
                out.addcmul_(integers, scale)
            else:
                out.add_(integers.mul_(scale).view(-1, *out.shape).sum(0))

    def _chunks(self, shape: Sequence[int], device: torch.device) -> Iterator[tuple[slice, slice]]:
        """Yield what to take at a time: some rows, or a part of a row; on an accelerator everything."""
        rows, length = shape
        limit = max(1, CPU_CHUNK if device.type == "cpu" else rows * length)
        together = max(1, limit // max(1, length))
        for row in range(0, rows, together):
            for start in range(0, length, limit):
                yield slice(row, row + together), slice(start, min(start + limit, length))

    def _parts(self, wire_RB: Tensor, places: slice) -> tuple[Tensor, Tensor]:
        """Return the scales and the packed integers of these places in each row, which has all its scales first."""
        split = wire_RB.shape[1] * SCALE_BYTES * 8 // (SCALE_BYTES * 8 + BLOCK * self.bits)
        scales = wire_RB[:, places.start // BLOCK * SCALE_BYTES : places.stop // BLOCK * SCALE_BYTES]
        codes = wire_RB[:, split + places.start * self.bits // 8 : split + places.stop * self.bits // 8]
        return scales.view(torch.bfloat16), codes

    def _pack(self, values_RN: Tensor, codes: Tensor) -> None:
        """Write the integers plane by plane; a byte holds a value of each of 8 / plane equal stretches."""
        if self.bits == 8:
            codes.copy_(values_RN)
            return
        values_RN = values_RN.to(torch.uint8)
        at, shift = 0, 0
        for plane in PLANES[self.bits]:
            together = 8 // plane
            size = values_RN.shape[1] // together
            part = torch.bitwise_right_shift(values_RN, shift) if shift else values_RN
            if shift + plane < self.bits:
                part = torch.bitwise_and(part, 2**plane - 1)
            stretches = part.view(-1, together, size)
            while together > 2:  # the second half beside the first, and so on: few kernels for many stretches
                together //= 2
                stretches = torch.add(stretches[:, :together], stretches[:, together:], alpha=2 ** (plane * together))
            out = codes[:, at : at + size]
            torch.add(stretches[:, 0], stretches[:, 1], alpha=2**plane, out=out)
            at, shift = at + size, shift + plane

    def _unpack(self, wire_RB: Tensor, places: slice) -> tuple[Tensor, Tensor]:
        """Return the integers [blocks, BLOCK] of these places, row after row, and the scales [blocks, 1]."""
        scales, codes = self._parts(wire_RB, places)
        values_RN = codes if self.bits == 8 else self._unpack_planes(codes, places.stop - places.start)
        integers = values_RN.to(torch.float32).sub_(self.half).view(-1, BLOCK)
        return integers, scales.to(torch.float32).view(-1, 1)

    def _unpack_planes(self, codes: Tensor, length: int) -> Tensor:
        parts, at = [], 0
        for plane, shifts in zip(PLANES[self.bits], self._shifts_on(codes.device), strict=True):
            size = length * plane // 8
            part = torch.bitwise_right_shift(codes[:, None, at : at + size], shifts).bitwise_and_(2**plane - 1)
            parts.append(part.view(len(codes), length))
            at += size
        if len(parts) == 2:
            parts[0].add_(parts[1], alpha=2 ** PLANES[self.bits][0])
        return parts[0]

    def _shifts_on(self, device: torch.device) -> list[Tensor]:
        """Return, for each plane, the shifts to a byte's lowest bit of the values that it holds."""
        if device not in self._shifts:
            self._shifts[device] = [
                torch.arange(0, 8, plane, dtype=torch.uint8, device=device).view(-1, 1) for plane in PLANES[self.bits]
            ]
        return self._shifts[device]
