"""The choice of options is the best one that fits, found in two ways."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_aigc.knapsack import choose, pareto


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_that_of_trying_all(seed: int) -> None:
    draw = random.Random(seed)
    groups = [[(draw.randrange(40), float(draw.randrange(100))) for _ in range(4)] for _ in range(5)]
    least = sum(min(nbytes for nbytes, _ in ways) for ways in groups)
    spare = least + draw.randrange(60)
    fits = [ways for ways in itertools.product(*groups) if sum(nbytes for nbytes, _ in ways) <= spare]
    best = min(sum(operations for _, operations in ways) for ways in fits)
    picks = choose(groups, spare)
    assert picks is not None
    chosen = [ways[pick] for ways, pick in zip(groups, picks, strict=True)]
    assert sum(nbytes for nbytes, _ in chosen) <= spare
    assert sum(operations for _, operations in chosen) == best


def test_nothing_fits_below_the_least() -> None:
    groups = [[(5, 1.0), (9, 0.0)], [(7, 1.0)]]
    assert choose(groups, 11) is None
    assert choose(groups, 12) == [0, 0]
    assert choose(groups, 16) == [1, 0]
    assert choose([], 0) == []


def test_an_option_that_another_beats_is_never_on_the_front() -> None:
    assert pareto([(3, 5.0), (1, 9.0), (2, 9.0), (4, 5.0), (5, 0.0)]) == [1, 0, 4]
