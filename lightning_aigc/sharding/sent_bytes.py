"""Model of the bytes that a rank sends in a step of a sharded training: rings of weights and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_aigc.sharding.stored_bytes import deal_out, stored_bytes

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
