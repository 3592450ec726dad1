"""Rows of sharded tensors, joined from the files of all ranks."""

from __future__ import annotations

import torch

from lightning_aigc.sharding.shards import joined


def rows(first: int, *values: float) -> dict[str, object]:
    return {"first_row": first, "rows": 3, "part": torch.tensor(values)}


def test_rows_are_joined_in_their_order_and_rank_0_says_the_rest() -> None:
    trees = [{"w": rows(2, 5.0), "seen": [1, 2]}, {"w": rows(0, 3.0, 4.0), "seen": [1]}, {"w": rows(3), "seen": []}]
    found = joined(trees)
    assert found["w"].tolist() == [3.0, 4.0, 5.0] and found["seen"] == [1, 2]


def test_rows_that_two_nodes_hold_are_their_mean() -> None:
    nodes = [rows(0, 1.0, 2.0), rows(2, 3.0), rows(0, 3.0, 2.0), rows(2, 5.0)]
    assert joined(nodes).tolist() == [2.0, 2.0, 4.0]
