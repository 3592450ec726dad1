"""Reductions of a mode, by kind of unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_aigc.cluster.modes import MODES
from lightning_aigc.gradient_sync.modes.block_sparse import BlockSparse, layer_of_each_block
from lightning_aigc.gradient_sync.modes.reductions import BFloat16, BlockQuantizer, Quantized, Reduction, Uncompressed
from lightning_aigc.gradient_sync.modes.ternary import Ternary
from lightning_aigc.gradient_sync.modes.two_four import TwoOfFour
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups
from lightning_aigc.gradient_sync.units import FlatUnit, Kind, own_shard
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
