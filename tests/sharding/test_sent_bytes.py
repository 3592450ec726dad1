"""Modelled bytes that a rank sends in a step; benchmarks/sharding/wire.py counts them on a network interface."""

from __future__ import annotations

import pytest

from lightning_aigc.sharding.stored_bytes import sent_bytes

SHAPES = [(8, 3), (4,), (16, 2, 2)]
VALUES = 24 + 4 + 64


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stage_gathers_weights_and_reduces_gradients_as_rings(ranks: int) -> None:
    ring = (ranks - 1) / ranks * 4 * VALUES
    ddp, two, three = (sent_bytes(SHAPES, stage, ranks) for stage in (0, 2, 3))
    assert (ddp.weights, ddp.gradients) == (0, 2 * ring)
    assert (two.weights, two.gradients) == (ring, ring)
    assert (three.weights, three.gradients) == (2 * ring, ring)
    assert sent_bytes(SHAPES, 2, ranks, gathered_itemsize=2).weights == ring / 2


def test_stage_1_sends_new_weights_from_the_rank_that_has_their_states() -> None:
    found = [sent_bytes(SHAPES, 1, 2, rank) for rank in range(2)]
    assert sum(of.weights for of in found) == 4 * VALUES
    assert {of.gradients for of in found} == {sent_bytes(SHAPES, 0, 2).gradients}


def test_uneven_rows_are_sent_with_their_padding() -> None:
    assert sent_bytes([(3, 5)], 2, 2).weights == 2 * 5 * 4  # two rows on each of two ranks, one of them padding
