"""Averages top_k of mode local: of each 4,096 values the largest, their places, signs, and one or two sizes.

Source: Sarfi et al., SparseLoCo, arXiv:2508.15706, whose 12-bit positions and 2-bit values are used for few values;
many have a bitmap of the chunk and signs alone. In SparseLoCo every rank gathers every other's largest values, so that
bytes grow with the ranks; between more than two ranks this takes the two hops of the other few-bit averages instead.

Legend: R rows, n chunks, C values of a chunk, K sent values of a chunk.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_aigc.cluster.modes import TOP_K_CHUNK as CHUNK
from lightning_aigc.cluster.modes import TOP_K_POSITIONS as MOST_POSITIONS
from lightning_aigc.cluster.modes import top_k_parts
from lightning_aigc.gradient_sync.modes.reductions import Reducing, Reduction, in_two_hops
from lightning_aigc.gradient_sync.transport.collectives import CountedGroup
from lightning_aigc.gradient_sync.units import FlatUnit

CPU_VALUES = 1 << 19
"""Values that a CPU encodes or decodes at once; eight times as many leave its cache, and take four times as long."""


class Layout(Protocol):
    """Wire format of chunks: their sizes, places and values, each uint8 [R, n, bytes]."""

    def encode_(self, chunks_RnC: Tensor, at_RnK: Tensor, sizes: Tensor, places: Tensor, values: Tensor) -> None:
        """Write the values at these positions of the chunks, and leave the rounding error in them."""

    def decode(self, chunks_RnC: Tensor, sizes: Tensor, places: Tensor, values: Tensor) -> None:
        """Write the decoded values to the chunks, and zeros between them."""

    def add_(self, chunks_RnC: Tensor, sizes: Tensor, places: Tensor, values: Tensor) -> None:
        """Add the decoded values to the chunks."""


class PositionsAndTwoSizes:
    """Positions of 12 bits, and values of two: a sign, and one of two sizes.

    The sizes are those of the chunk: the mean of the sent values that are no larger than the mean, and of the others.
    """

    def encode_(self, chunks_RnC: Tensor, at_RnK: Tensor, sizes: Tensor, places: Tensor, values: Tensor) -> None:
        at_RnK = at_RnK.sort(dim=-1).values
        kept_RnK = chunks_RnC.gather(-1, at_RnK)
        of_kept = kept_RnK.abs()
        is_large = of_kept > of_kept.mean(-1, keepdim=True)
        both = _write_sizes(sizes, torch.stack([_mean_where(~is_large, of_kept), _mean_where(is_large, of_kept)], -1))
        code = is_large.to(torch.uint8) + 2 * kept_RnK.signbit().to(torch.uint8)
        places.copy_(_packed_positions(at_RnK))
        values.copy_(_packed(code, 2))
        chunks_RnC.scatter_(-1, at_RnK, kept_RnK - _values_of(code, both))

    def decode(self, chunks_RnC: Tensor, sizes: Tensor, places: Tensor, values: Tensor) -> None:
        chunks_RnC.zero_().scatter_(-1, _positions(places), _values_of(_unpacked(values, 2), _sizes(sizes)))

    def add_(self, chunks_RnC: Tensor, sizes: Tensor, places: Tensor, values: Tensor) -> None:
        chunks_RnC.scatter_add_(-1, _positions(places), _values_of(_unpacked(values, 2), _sizes(sizes)))


class BitmapAndSigns:
    """A bit for each value of the chunk that says whether it was sent, and signs; all have the mean size."""

    def encode_(self, chunks_RnC: Tensor, at_RnK: Tensor, sizes: Tensor, places: Tensor, values: Tensor) -> None:
        kept_RnK = chunks_RnC.gather(-1, at_RnK)
        size = _write_sizes(sizes, kept_RnK.abs().mean(-1, keepdim=True))
        is_sent_RnC = torch.zeros_like(chunks_RnC, dtype=torch.uint8).scatter_(-1, at_RnK, 1)
        places.copy_(_packed(is_sent_RnC, 1))
        sign_RnK = kept_RnK.signbit().to(torch.uint8)
        order_RnK = _order(is_sent_RnC).gather(-1, at_RnK)  # cheaper than sorting the positions
        values.copy_(_packed(torch.empty_like(sign_RnK).scatter_(-1, order_RnK, sign_RnK), 1))
        chunks_RnC.scatter_(-1, at_RnK, kept_RnK - (1 - 2 * sign_RnK.float()) * size)

    def decode(self, chunks_RnC: Tensor, sizes: Tensor, places: Tensor, values: Tensor) -> None:
        chunks_RnC.copy_(self._decoded(sizes, places, values))

    def add_(self, chunks_RnC: Tensor, sizes: Tensor, places: Tensor, values: Tensor) -> None:
        chunks_RnC.add_(self._decoded(sizes, places, values))

    def _decoded(self, sizes: Tensor, places: Tensor, values: Tensor) -> Tensor:
        is_sent_RnC = _unpacked(places, 1)
        value_RnK = (1 - 2 * _unpacked(values, 1).float()) * _sizes(sizes)
        order_RnC = _order(is_sent_RnC).clamp_max_(value_RnK.shape[-1] - 1)  # behind the last sent value
        return value_RnK.gather(-1, order_RnC).mul_(is_sent_RnC)


class TopKQuantizer:
    """Quantizer that keeps the `kept` largest of each 4,096 values, in a layout for few values or one for many.

    A kept value that is not finite makes a size of its chunk infinite or NaN, and so decoded values of the chunk.
    """

    multiple = CHUNK

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.layout: Layout = PositionsAndTwoSizes() if kept <= MOST_POSITIONS else BitmapAndSigns()

    def wire_bytes(self, length: int) -> int:
        return length // CHUNK * sum(top_k_parts(self.kept))

    def encode_(self, values_RN: Tensor, wire_RB: Tensor) -> None:
        for chunks, *wire in self._blocks(values_RN, wire_RB):
            self.layout.encode_(chunks, chunks.abs().topk(self.kept, dim=-1, sorted=False).indices, *wire)

    def decode(self, wire_RB: Tensor, out_RN: Tensor) -> Tensor:
        check = out_RN.new_zeros(())
        for chunks, sizes, places, values in self._blocks(out_RN, wire_RB):
            self.layout.decode(chunks, sizes, places, values)
            check = check + _sizes(sizes).sum()
        return check

    def add_rows_(self, wire_RB: Tensor, out_N: Tensor) -> None:
        for row_B in wire_RB.unbind(0):
            for chunks, *wire in self._blocks(out_N[None], row_B[None]):
                self.layout.add_(chunks, *wire)

    def _blocks(self, values_RN: Tensor, wire_RB: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return chunks [R, n, C] with views of their wire: sizes, places and values [R, n, bytes]."""
        chunks = torch.unflatten(values_RN, 1, (-1, CHUNK))
        count = chunks.shape[1]
        parts = torch.split(wire_RB, [count * size for size in top_k_parts(self.kept)], dim=1)
        wire = (torch.unflatten(part, 1, (count, -1)) for part in parts)
        rows = max(1, values_RN.shape[0])
        at_once = max(1, CPU_VALUES // CHUNK // rows) if values_RN.device.type == "cpu" else max(1, count)
        return list(zip(*(torch.split(part, at_once, dim=1) for part in (chunks, *wire)), strict=True))


class TopK(Reduction):
    """Sends the largest values of the sum in two hops; two ranks send theirs to each other in one."""

    def __init__(self, kept: int) -> None:
        self.quantizer = TopKQuantizer(kept)

    def reduce(self, unit: FlatUnit, e_N: Tensor, group: CountedGroup) -> Reducing:
        if group.size > 2:
            result = yield from in_two_hops(e_N, self.quantizer, group, unit.kind)
            return result
        own_B = torch.empty(self.quantizer.wire_bytes(e_N.numel()), dtype=torch.uint8, device=e_N.device)
        self.quantizer.encode_(e_N[None], own_B[None])
        received_B = own_B.new_empty(group.size * own_B.numel())
        yield group.all_gather(received_B, own_B, unit.kind)
        total_N = torch.zeros_like(e_N)
        self.quantizer.add_rows_(received_B.view(group.size, -1), total_N)
        return total_N, total_N.sum()


def _mean_where(mask: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean of the sizes under the mask along the last dimension; 0 where there is none."""
    return torch.where(mask, sizes, 0).sum(-1) / mask.sum(-1).clamp_min(1)


def _order(is_sent_RnC: Tensor) -> Tensor:
    """Return the number of sent values before each value of its chunk, which is a sent value's place among them."""
    return is_sent_RnC.cumsum(-1).sub_(is_sent_RnC)


def _write_sizes(wire: Tensor, sizes: Tensor) -> Tensor:
    """Write sizes in bfloat16. Returns: the sizes as they decode, in float32."""
    rounded = sizes.bfloat16()
    wire.copy_(rounded.view(torch.uint8))
    return rounded.float()


def _sizes(wire: Tensor) -> Tensor:
    """Return the sizes in float32. Their bytes are copied, because they may begin at an odd address."""
    return wire.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()


def _values_of(code: Tensor, sizes: Tensor) -> Tensor:
    of_value = sizes.gather(-1, (code & 1).long())
    return torch.where(code > 1, -of_value, of_value)


def _packed_positions(at: Tensor) -> Tensor:
    """Return two 12-bit positions in three bytes."""
    first, second = torch.unflatten(at, -1, (-1, 2)).unbind(-1)
    return torch.stack([first & 255, (first >> 8) + ((second & 15) << 4), second >> 4], -1).to(torch.uint8).flatten(-2)


def _positions(packed: Tensor) -> Tensor:
    low, middle, high = torch.unflatten(packed, -1, (-1, 3)).long().unbind(-1)
    return torch.stack([low + ((middle & 15) << 8), (middle >> 4) + (high << 4)], -1).flatten(-2)


def _packed(code: Tensor, bits: int) -> Tensor:
    """Return uint8 codes of 1 or 2 bits in bytes, the first in the lowest bits."""
    in_byte = torch.unflatten(code, -1, (-1, 8 // bits)).unbind(-1)
    packed = in_byte[0].clone()
    for place, each in enumerate(in_byte[1:], 1):
        packed |= each << bits * place
    return packed


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)
