"""Quantized sync on a CPU without a flat vector: from gradients to the wire, and from the wire into gradients.

The path of other devices takes nine passes over memory: `UnitReducer` flattens a unit, a `Quantized` reduction packs,
adds and unpacks it, and the sum is written back. This one takes three, with bit-identical sums and residuals.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_aigc.gradient_sync.modes.reductions import BlockQuantizer
from lightning_aigc.gradient_sync.transport.collectives import CountedGroup
from lightning_aigc.gradient_sync.units import ALIGNMENT, Entry, FlatUnit
from lightning_aigc_kernels.quantize_blocks import BLOCK, GROUP, part_kernel, scale_magnitude

NOTHING = np.empty(0, np.float32), np.empty(0, np.uint8), np.empty(0, np.uint16)


@dataclass(frozen=True)
class Piece:
    """Part of a unit within one shard and one parameter, or the padding at the end."""

    name: str | None
    offset: int
    """Start in the parameter."""
    length: int
    """Number of values; a parameter's last piece is padded to a multiple of ALIGNMENT."""
    shard: int
    start: int
    """Start in the shard, a multiple of ALIGNMENT."""


def pieces_of(unit: FlatUnit, shards: int) -> list[Piece]:
    """Return the pieces of a unit of kind "values" in order, for this number of shards."""
    size = unit.numel // shards
    last = unit.entries[-1]
    end = -(-last.stop // ALIGNMENT) * ALIGNMENT
    rest = Entry("", torch.Size([unit.numel - end]), end)
    pieces = []
    for entry in (*unit.entries, rest):
        at = entry.start
        while at < entry.stop:
            stop = min(entry.stop, (at // size + 1) * size)
            pieces.append(Piece(entry.name or None, at - entry.start, stop - at, at // size, at % size))
            at = stop
    return pieces


class DirectUnit:
    """Reduces one unit of kind "values" as `Quantized` does, in the same two hops."""

    def __init__(self, unit: FlatUnit, quantizer: BlockQuantizer, group: CountedGroup) -> None:
        self._quantizer, self._group = quantizer, group
        self._length = unit.numel // group.size
        self._pieces = pieces_of(unit, group.size)

    def takes(self, gradients: Mapping[str, Tensor]) -> bool:
        """Whether these gradients can be read and written as they lie in memory."""
        return part_kernel(torch.device("cpu")) is not None and all(
            g.dtype == torch.float32 and g.is_contiguous() and not g.is_sparse for g in gradients.values()
        )

    def reduce(
        self, gradients: Mapping[str, Tensor], share: float, residual: Tensor, error: Tensor, scale: float
    ) -> Generator[Any, None, Tensor]:
        """Replace gradients by the sum over the ranks of share * gradient + residual, times `scale`.

        The part that was not sent is written to `error`. Returns: a number that is finite when the sum is.
        """
        group, wire_bytes = self._group, self._quantizer.wire_bytes(self._length)
        flat = {name: gradient.detach().view(-1).numpy() for name, gradient in gradients.items()}
        out_RB, received_RB = (torch.empty(group.size, wire_bytes, dtype=torch.uint8) for _ in range(2))
        pack = _Packer(self._quantizer.bits, flat, share, residual.numpy(), error.numpy(), self._length)
        for piece in self._pieces:
            if piece.shard != group.rank:
                pack(piece, out_RB[piece.shard], None, -1)
        yield group.all_to_all(received_RB.view(-1), out_RB.view(-1))  # no rank reads its own row

        sum_B = torch.empty(wire_bytes, dtype=torch.uint8)
        for piece in self._pieces:
            if piece.shard == group.rank:
                pack(piece, sum_B, received_RB, group.rank)
        yield group.all_gather(received_RB.view(-1), sum_B)

        kernel: Any = part_kernel(residual.device)
        groups = self._length // GROUP
        for piece in self._pieces:
            if piece.name is not None:
                codes = received_RB[piece.shard].numpy()
                out = flat[piece.name][piece.offset : piece.offset + piece.length]
                first = piece.start // GROUP
                kernel.dequantize_part(codes, codes.view(np.uint16), groups, first, self._quantizer.bits, scale, out)
        return scale_magnitude(received_RB, self._length)


class _Packer:
    """Packs pieces into rows."""

    def __init__(
        self,
        bits: int,
        gradients: Mapping[str, NDArray[np.float32]],
        share: float,
        residual: NDArray[np.float32],
        error: NDArray[np.float32],
        length: int,
    ) -> None:
        self._kernel: Any = part_kernel(torch.device("cpu"))
        self._bits, self._gradients, self._share, self._length = bits, gradients, share, length
        self._residual, self._error = residual, error

    def __call__(self, piece: Piece, row_B: Tensor, received_RB: Tensor | None, mine: int) -> None:
        """Pack a piece into its place in a row, with all received rows but `mine` added to it."""
        new, received, received_scales = NOTHING
        if piece.name is not None:
            new = self._gradients[piece.name][piece.offset : piece.offset + piece.length]
        rows = 0
        if received_RB is not None:
            rows, received = len(received_RB), received_RB.view(-1).numpy()
            received_scales = received.view(np.uint16)
        start = piece.shard * self._length + piece.start
        part = slice(start, start - (-piece.length // GROUP) * GROUP)
        codes = row_B.numpy()
        self._kernel.quantize_part(
            new, self._share, self._residual[part], self._error[part], received, received_scales, rows, mine,
            codes, codes.view(np.uint16), self._length // GROUP, piece.start // GROUP, self._bits, BLOCK,
        )  # fmt: skip
