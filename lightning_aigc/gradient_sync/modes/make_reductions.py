"""Reductions of a mode, by kind of unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.cluster.modes import MODES
from lightning_aigc.gradient_sync.modes.block_sparse import BlockSparse, layer_of_each_block
from lightning_aigc.gradient_sync.modes.reductions import (
    BFloat16,
    BlockQuantizer,
    Quantized,
    Reducing,
    Reduction,
    Uncompressed,
    in_two_hops,
)
from lightning_aigc.gradient_sync.modes.ternary import Ternary
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.transport.collectives import CountedGroup
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups
from lightning_aigc.gradient_sync.units import FlatUnit, Kind, own_shard
from lightning_aigc.host_state import to_cpu
from lightning_aigc_kernels.quantize_blocks import part_kernel


def make_reductions(
    options: SyncOptions, units: Sequence[FlatUnit], groups: ProcessGroups, device: torch.device
) -> dict[Kind, Reduction]:
    """Return the reduction of each kind of unit."""
    traits = MODES[options.mode]
    if not traits.is_exact and options.mode != "bf16":
        part_kernel(device)  # compiled before threads run: a process forked with running threads could hang
    small: Reduction = Uncompressed() if traits.is_exact else BFloat16() if options.mode == "bf16" else Quantized(8)
    return {"values": _values_reduction(options, units, groups, device), "small": small, "protected": Uncompressed()}


def _values_reduction(
    options: SyncOptions, units: Sequence[FlatUnit], groups: ProcessGroups, device: torch.device
) -> Reduction:
    mode, traits = options.mode, MODES[options.mode]
    units = [unit for unit in units if unit.kind == "values"]
    if mode == "bf16":
        return BFloat16()
    if mode == "ternary":
        return Ternary(device)
    start = {unit.index: own_shard(unit, groups)[0] for unit in units}
    length = {unit.index: own_shard(unit, groups)[1] for unit in units}
    if mode == "two_four":
        return TwoOfFour(length, device)
    if traits.is_block_sparse:
        layers = {i: of.to(device) for i, of in layer_of_each_block(units, start, length).items()}
        quantizer = BlockQuantizer(traits.value_bits) if traits.value_bits else None
        return BlockSparse(layers, 1 - options.sparsity, quantizer, adaptive=options.layer_wise_adaptive)
    return Quantized(traits.value_bits) if traits.value_bits else Uncompressed()


class TwoOfFour(Reduction):
    """Sends two of every four neighbours in eight bits: the largest, and of the others the one that waited longest.

    A value's expected size is its size when it was last sent, times the steps since. Eight bits are half the bytes of
    bfloat16, at the same loss.
    """

    def __init__(self, lengths: dict[int, int], device: torch.device) -> None:
        self._seen = {i: torch.zeros(n // 4, 4, dtype=torch.bfloat16, device=device) for i, n in lengths.items()}
        self._age = {i: torch.zeros(n // 4, 4, dtype=torch.uint8, device=device) for i, n in lengths.items()}
        self._next: dict[int, tuple[Tensor, Tensor]] = {}
        self._quantizer = BlockQuantizer(8)

    def reduce(self, unit: FlatUnit, e_N: Tensor, group: CountedGroup) -> Reducing:
        seen, age = self._seen[unit.index], self._age[unit.index]
        largest = (seen.float() * (1 + age.float())).argmax(1, keepdim=True)
        oldest = age.to(torch.int16).scatter(1, largest, -1).argmax(1, keepdim=True)
        pattern = torch.cat([largest, oldest], 1)
        fours = e_N.view(-1, 4)
        values_M = fours.gather(1, pattern).view(-1)
        values_M[0] += 0 * fours.sum()  # NaN where a value that is not sent is not finite: every rank must know
        multiple = group.size * self._quantizer.multiple
        padded = torch.nn.functional.pad(values_M, (0, -values_M.numel() % multiple))
        sums, check = yield from in_two_hops(padded, self._quantizer, group)
        fours.scatter_(1, pattern, padded[: values_M.numel()].view(-1, 2))
        total = sums[: values_M.numel()].view(-1, 2)
        total_N = torch.zeros_like(e_N)
        total_N.view(-1, 4).scatter_(1, pattern, total)
        older = age.clamp_max(254) + 1
        self._next[unit.index] = (
            seen.scatter(1, pattern, total.abs().bfloat16()),
            older.scatter(1, pattern, torch.zeros_like(pattern, dtype=torch.uint8)),
        )
        return total_N, check

    def observe(self, unit: FlatUnit, total_N: Tensor) -> None:
        self._next[unit.index] = total_N.view(-1, 4).abs().bfloat16(), torch.zeros_like(self._age[unit.index])

    def commit(self) -> None:
        for index, (seen, age) in self._next.items():
            self._seen[index], self._age[index] = seen, age
        self.rollback()

    def rollback(self) -> None:
        self._next = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": to_cpu({str(i): value for i, value in self._seen.items()}, clone=True),
            "age": to_cpu({str(i): value for i, value in self._age.items()}, clone=True),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, seen in self._seen.items():
            saved = state["seen"].get(str(i))
            if saved is not None and saved.shape == seen.shape:
                self._seen[i], self._age[i] = saved.to(seen.device), state["age"][str(i)].to(seen.device)
