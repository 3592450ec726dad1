"""Averages top_k of mode local: of each 4,096 values the largest, with 12-bit positions and 2-bit values.

Source: Sarfi et al., SparseLoCo, arXiv:2508.15706. There every rank gathers every other's largest values, so that bytes
grow with the ranks; between more than two ranks this takes the two hops of the other few-bit averages instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_aigc.cluster.modes import TOP_K_CHUNK as CHUNK
from lightning_aigc.cluster.modes import TOP_K_LEVEL_BYTES as LEVEL_BYTES
from lightning_aigc.gradient_sync.modes.reductions import Reducing, Reduction, in_two_hops
from lightning_aigc.gradient_sync.transport.collectives import CountedGroup
from lightning_aigc.gradient_sync.units import FlatUnit

CPU_VALUES = 1 << 22
"""Values that a CPU encodes at once."""


class TopKQuantizer:
    """Quantizer that keeps the `kept` largest of each 4,096 values: their positions, signs, and one of two sizes.

    The sizes are those of the chunk: the mean of the kept values that are no larger than the mean, and of the others.

    A kept value that is not finite makes a size of its chunk infinite or NaN, and so decoded values of the chunk.
    """

    multiple = CHUNK

    def __init__(self, kept: int) -> None:
        self.kept = kept

    def wire_bytes(self, length: int) -> int:
        return length // CHUNK * (LEVEL_BYTES + self.kept * 14 // 8)

    def encode_(self, values_RN: Tensor, wire_RB: Tensor) -> None:
        for chunks, levels, positions, codes in self._blocks(values_RN, wire_RB):
            at = chunks.abs().topk(self.kept, dim=-1, sorted=False).indices.sort(dim=-1).values
            kept = chunks.gather(-1, at)
            sizes = kept.abs()
            is_large = sizes > sizes.mean(-1, keepdim=True)
            both = torch.stack([_mean_where(~is_large, sizes), _mean_where(is_large, sizes)], -1)
            levels.copy_(both)
            code = is_large.to(torch.uint8) + 2 * kept.signbit().to(torch.uint8)
            positions.copy_(_packed_positions(at))
            codes.copy_(_packed_codes(code))
            chunks.scatter_(-1, at, kept - _values(code, levels))

    def decode(self, wire_RB: Tensor, out_RN: Tensor) -> Tensor:
        check = out_RN.new_zeros(())
        for chunks, levels, positions, codes in self._blocks(out_RN, wire_RB):
            chunks.zero_().scatter_(-1, _positions(positions), _values(_codes(codes), levels))
            check = check + levels.sum(dtype=torch.float32)
        return check

    def add_rows_(self, wire_RB: Tensor, out_N: Tensor) -> None:
        for row_1B in torch.split(wire_RB, 1):
            for chunks, levels, positions, codes in self._blocks(out_N[None], row_1B):
                chunks.scatter_add_(-1, _positions(positions), _values(_codes(codes), levels))

    def _blocks(self, values_RN: Tensor, wire_RB: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return chunks [R, n, CHUNK] with views of their wire: levels [R, n, 2], positions and codes [R, n, bytes]."""
        chunks = torch.unflatten(values_RN, 1, (-1, CHUNK))
        count = chunks.shape[1]
        sizes = [count * LEVEL_BYTES, count * self.kept * 12 // 8, count * self.kept * 2 // 8]
        levels, positions, codes = (torch.unflatten(p, 1, (count, -1)) for p in torch.split(wire_RB, sizes, dim=1))
        rows = max(1, values_RN.shape[0])
        at_once = max(1, CPU_VALUES // CHUNK // rows) if values_RN.device.type == "cpu" else max(1, count)
        parts = (chunks, levels.view(torch.bfloat16), positions, codes)
        return list(zip(*(torch.split(part, at_once, dim=1) for part in parts), strict=True))


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


def _values(code: Tensor, levels: Tensor) -> Tensor:
    sizes = levels.float().gather(-1, (code & 1).long())
    return torch.where(code > 1, -sizes, sizes)


def _packed_positions(at: Tensor) -> Tensor:
    """Return two 12-bit positions in three bytes."""
    first, second = torch.unflatten(at, -1, (-1, 2)).unbind(-1)
    return torch.stack([first & 255, (first >> 8) + ((second & 15) << 4), second >> 4], -1).to(torch.uint8).flatten(-2)


def _positions(packed: Tensor) -> Tensor:
    low, middle, high = torch.unflatten(packed, -1, (-1, 3)).long().unbind(-1)
    return torch.stack([low + ((middle & 15) << 8), (middle >> 4) + (high << 4)], -1).flatten(-2)


def _packed_codes(code: Tensor) -> Tensor:
    """Return four 2-bit codes in a byte."""
    a, b, c, d = torch.unflatten(code, -1, (-1, 4)).unbind(-1)
    return a + (b << 2) + (c << 4) + (d << 6)


def _codes(packed: Tensor) -> Tensor:
    return torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
