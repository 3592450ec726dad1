"""The rate that a search finds, on agreements that are made up and ones that were recorded."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from lightning_aigc.schedulers.rate_search import MAX_STEPS, RateSearch
from lightning_aigc.schedulers.step_statistics import LastStep


def searched(agreement: Callable[[float], float], max_raise: float = 30.0, share: float = 0.01) -> RateSearch:
    search = RateSearch(max_raise)
    for _ in range(MAX_STEPS):
        if search.ended_for is None:
            search.update(LastStep(agreement(search.rate), share))
    assert search.ended_for is not None
    return search


def noisy(edge: float, noise: float, seed: int) -> Callable[[float], float]:
    """Losses like those of the tiny fine-tune: a plateau of 0.13 below the edge, a little below zero past it."""
    generator = random.Random(seed)

    def agreement(rate: float) -> float:
        return generator.gauss(0.13 if rate < edge else -0.04, noise if rate < edge else 0.4 * noise)

    return agreement


@pytest.mark.parametrize("edge", [0.003, 0.01, 0.05, 0.3, 1.0, 3.0, 10.0])
def test_it_ends_near_the_rate_where_steps_overshoot_wherever_that_is(edge: float) -> None:
    assert 0.5 < searched(lambda rate: 0.15 * (1 - rate / edge)).rate / edge < 2.0


@pytest.mark.parametrize("edge", [0.1, 0.3, 3.0])
def test_noise_of_batches_of_one_moves_what_it_finds_by_little(edge: float) -> None:
    found = sorted(searched(noisy(edge, 0.06, seed)).rate / edge for seed in range(200))
    assert found[10] > 0.2  # 95 %
    assert found[190] < 3.1
    assert found[-1] < 6.0
    assert 0.5 < found[100] < 2.0


def test_agreements_that_are_noise_alone_keep_the_configured_rate() -> None:
    def noise(seed: int) -> Callable[[float], float]:
        generator = random.Random(seed)
        return lambda rate: generator.gauss(0.0, 0.06)

    found = sorted(searched(noise(seed)).rate for seed in range(200))
    assert sum(rate == 1.0 for rate in found) > 150
    assert found[-1] == 1.0


def test_a_rate_found_a_little_below_the_configured_one_is_that_one() -> None:
    assert searched(lambda rate: 0.1 if rate < 0.7 else -0.04).rate == 1.0
    assert searched(lambda rate: 0.1 if rate < 0.3 else -0.04).rate < 0.5


def test_a_search_without_an_end_stops_at_max_raise() -> None:
    search = searched(lambda rate: 0.1, max_raise=7.0)
    assert search.rate == 7.0
    assert "max_raise is reached" in (search.ended_for or "")


def test_steps_that_never_agree_say_nothing_about_the_rate() -> None:
    search = searched(lambda rate: -0.1)  # gradient ascent, say
    assert search.rate == 1.0


def test_a_step_that_changes_the_weights_by_much_ends_it_whatever_it_agrees_with() -> None:
    search = RateSearch(30.0)
    for _ in range(8):
        search.update(LastStep(0.1, 0.01))
    reached = search.rate
    search.update(LastStep(0.1, 0.22))
    assert "changed the trained weights by 22%" in (search.ended_for or "")
    assert search.rate == reached / 2


def test_a_first_step_that_changes_the_weights_by_much_starts_it_again_lower() -> None:
    search = RateSearch(30.0)
    started = search.rate
    search.update(LastStep(0.1, 0.22))
    assert search.ended_for is None
    assert search.rate == pytest.approx(0.1 * started)


def test_where_no_step_is_ever_measured_the_configured_rate_is_kept_in_the_end() -> None:
    search = RateSearch(30.0)
    for last_step in itertools.repeat(None, MAX_STEPS):
        search.update(last_step)
    assert search.rate == 1.0
    assert search.ended_for is not None


def test_an_agreement_that_is_not_a_number_is_left_out() -> None:
    search = RateSearch(30.0)
    search.update(LastStep(math.nan, 0.01))
    assert search.state_dict()["agreements"] == []
