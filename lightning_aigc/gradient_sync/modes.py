"""The reduction of each mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_aigc.gradient_sync.block_integers import BlockIntegers
from lightning_aigc.gradient_sync.groups import Groups
from lightning_aigc.gradient_sync.layout import Unit
from lightning_aigc.gradient_sync.low_rank import LowRank
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.reductions import BFloat16, Integers, Reduction, Whole
from lightning_aigc.gradient_sync.sparse import SharedBlocks, TwoOfFour, layer_of_each_block

BITS = {"int8": 8, "int4": 4, "int3": 3, "sparse_int8": 8, "sparse_int4": 4}


def make_reduction(options: SyncOptions, units: Sequence[Unit], groups: Groups, device: torch.device) -> Reduction:
    """What reduces the compressed ones of these units."""
    mode = options.mode
    units = [unit for unit in units if not unit.whole]
    if mode in ("int8", "int4", "int3"):
        return Integers(BITS[mode])
    if mode == "bf16":
        return BFloat16()
    if mode == "low_rank":
        return LowRank(units, options.rank, device)
    start = {unit.index: own_part(unit, groups)[0] for unit in units}
    length = {unit.index: own_part(unit, groups)[1] for unit in units}
    if mode == "two_four":
        return TwoOfFour(length, device)
    if mode.startswith("sparse"):
        layers = {i: of.to(device) for i, of in layer_of_each_block(units, start, length).items()}
        code = BlockIntegers(BITS[mode]) if mode in BITS else None
        return SharedBlocks(layers, 1 - options.sparsity, code, adaptive=options.layer_wise_adaptive)
    return Whole()


def own_part(unit: Unit, groups: Groups) -> tuple[int, int]:
    """Where the part of a unit begins that its node leaves to this rank, and its length; all of it in a flat sync."""
    if groups.inside is None:
        return 0, unit.numel
    length = unit.numel // groups.inside.size
    return groups.inside.rank * length, length
