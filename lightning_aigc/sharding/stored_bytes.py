"""Bytes that a rank stores of a sharded training, exactly, and those that it sends in a step.

Stage 1 assigns full parameters, the largest first, each to the rank with the least, like torch's
ZeroRedundancyOptimizer. Stages 2 and 3 divide each parameter by rows and pad the last rank's part, like torch's
`fully_shard`. Source of the stages: Rajbhandari et al., ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

STEP_BYTES = 4
"""Size of Adam's step counter, one per parameter."""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of one rank between two steps, without gathered weights and activations."""

    parameters: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.states


def stored_bytes(
    shapes: Sequence[Sequence[int]], stage: int, ranks: int, rank: int = 0, *, moments: int = 2, itemsize: int = 4
) -> StoredBytes:
    """Return the bytes that one rank stores of parameters of these shapes, in the optimizer's order.

    Args: stage: 0 for DDP, else ZeRO's stage. moments: tensors of a parameter's shape that the optimizer keeps, 2 for
        Adam; with any, each parameter has a step counter too.
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    counter = STEP_BYTES if moments else 0
    if stage <= 1:
        full = sum(sizes) * itemsize
        mine = range(len(sizes)) if stage == 0 else deal_out(sizes, ranks)[rank]
        return StoredBytes(full, full, sum(moments * itemsize * sizes[i] + counter for i in mine))
    padded = stored = 0
    for shape, size in zip(shapes, sizes, strict=True):
        rows = shape[0] if len(shape) else 1
        row, part = size // max(rows, 1), -(-rows // ranks)
        padded += part * row
        stored += max(0, min(rows, (rank + 1) * part) - rank * part) * row
    states = moments * itemsize * stored + counter * len(sizes)
    return StoredBytes(padded * itemsize, padded * itemsize, states)


def deal_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices of the parameters whose states each rank keeps in stage 1."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        dealt[rank].append(i)
        loads[rank] += sizes[i]
    return dealt


def share_saved(stage: int, ranks: int) -> float:
    """Return the share of DDP's 16 bytes per parameter that a stage saves with Adam and float32 weights."""
    if stage == 1:
        return (1 - 1 / ranks) * 8 / 16
    return 1 - 1 / ranks


GRADIENT_BYTES = 4
"""Gradients are reduced in float32 at every precision."""


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank sends in an optimizer step of one micro-batch."""

    weights: float
    """Weights gathered for forward and backward; in stage 1 the new weights from the owner of their states."""
    gradients: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients


def sent_bytes(
    shapes: Sequence[Sequence[int]],
    stage: int,
    ranks: int,
    rank: int = 0,
    *,
    gathered_itemsize: int = 4,
) -> SentBytes:
    """Return the bytes that one rank sends of parameters of these shapes.

    A ring sends each part once to each other rank: (K - 1) parts to gather, the same number to reduce and scatter, and
    DDP's all-reduce does both. Stage 3 gathers each block twice, for its forward and for its backward, stage 2 once.

    Args: stage: 0 for DDP, else ZeRO's stage. gathered_itemsize: bytes of a weight as it is gathered, 2 under
        bf16-mixed.
    """
    sizes = [stored_bytes([shape], 0, 1, moments=0, itemsize=1).parameters for shape in shapes]
    others = ranks - 1
    if stage <= 1:
        gradients = 2 * others / ranks * sum(sizes) * GRADIENT_BYTES
        mine = sum(sizes[i] for i in deal_out(sizes, ranks)[rank]) if stage == 1 else 0
        return SentBytes(others * mine * 4, gradients)  # each rank steps float32 weights
    part = stored_bytes(shapes, stage, ranks, moments=0, itemsize=1).parameters
    gradients = others * part * GRADIENT_BYTES
    return SentBytes((2 if stage == 3 else 1) * others * part * gathered_itemsize, gradients)
