"""What a rank stores of a sharded training, to the byte: parameters, gradients and optimizer states.

Stage 1 deals out whole parameters, the largest first, each to the rank with the least, as torch's
ZeroRedundancyOptimizer does. Stages 2 and 3 cut each parameter by rows, and pad the last rank's part of it, as torch's
`fully_shard` does. Source of the stages: Rajbhandari et al., ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

STEP_BYTES = 4
"""Of Adam's counter of steps, which each parameter has."""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of one rank between two steps; gathered weights and activations come on top."""

    parameters: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.states


def stored_bytes(
    shapes: Sequence[Sequence[int]], stage: int, ranks: int, rank: int = 0, *, moments: int = 2, itemsize: int = 4
) -> StoredBytes:
    """Return what one of these ranks stores of parameters of these shapes, in the order of the optimizer.

    Args: stage: 0 for DDP, else ZeRO's stage. moments: tensors of a parameter's shape that the optimizer keeps, 2 for
        Adam; each parameter has a step counter besides, if there are any.
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    counter = STEP_BYTES if moments else 0
    if stage <= 1:
        whole = sum(sizes) * itemsize
        mine = range(len(sizes)) if stage == 0 else deal_out(sizes, ranks)[rank]
        return StoredBytes(whole, whole, sum(moments * itemsize * sizes[i] + counter for i in mine))
    padded = own = 0
    for shape, size in zip(shapes, sizes, strict=True):
        rows = shape[0] if len(shape) else 1
        row, part = size // max(rows, 1), -(-rows // ranks)
        padded += part * row
        own += max(0, min(rows, (rank + 1) * part) - rank * part) * row
    states = moments * itemsize * own + counter * len(sizes)
    return StoredBytes(padded * itemsize, padded * itemsize, states)


def deal_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return which parameters' states each rank keeps in stage 1, by their places."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        dealt[rank].append(i)
        loads[rank] += sizes[i]
    return dealt


def share_saved(stage: int, ranks: int) -> float:
    """Return the share of DDP's 16 bytes a parameter that a stage saves with Adam and float32 weights."""
    if stage == 1:
        return (1 - 1 / ranks) * 8 / 16
    return 1 - 1 / ranks
