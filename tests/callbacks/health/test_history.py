"""Robust deviations of a value from its history."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from lightning_aigc.callbacks.health.history.history import History
from lightning_aigc.callbacks.health.history.loss_history import LossHistory
from lightning_aigc.callbacks.health.thresholds import HealthThresholds


def filled(values: list[float], length: int = 100) -> History:
    history = History(length, shortest=10)
    for value in values:
        history.add(value)
    return history


def test_z_of_a_lognormal_history_is_that_of_its_logarithm() -> None:
    draw = random.Random(0)
    history = filled([math.exp(draw.gauss(0, 0.5)) for _ in range(1000)], length=1000)
    assert history.z(math.exp(2.0)) == pytest.approx(4.0, abs=0.4)


def test_a_few_wild_values_do_not_hide_the_next() -> None:
    history = filled([1.0, 1.1, 0.9, 1e6, 1.0, 1.05, 0.95, 1e7, 1.0, 1.0, 1.1, 0.9])
    assert history.is_spike(1e5, z=6, ratio=10)
    assert not history.is_spike(1.3, z=6, ratio=10)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_has_no_logarithm_is_neither_kept_nor_judged(value: float) -> None:
    history = filled([1.0] * 20)
    history.add(value)
    assert len(history) == 20
    assert history.z(value) == 0


def test_a_short_history_judges_nothing() -> None:
    assert filled([1.0] * 9).z(1e9) == 0
    assert filled([1.0] * 10).z(1e9) > 6


def test_a_loss_is_judged_within_its_own_timesteps() -> None:
    """0.5 is usual at low timesteps, and a spike at high ones."""
    losses = LossHistory(HealthThresholds(), timesteps=1000)
    for _ in range(30):
        losses.add([0.5, 0.01], [50, 950])
    usual, layers = losses.add([0.5], [20])
    assert usual == [] and layers == {"loss.timesteps_0_99"}
    spikes, _ = losses.add([0.5], [950])
    assert [spike.layer for spike in spikes] == ["loss.timesteps_900_999"]


def test_bucket_names_share_out_every_timestep_once() -> None:
    losses = LossHistory(HealthThresholds(timestep_buckets=7), timesteps=1000)
    ends = [tuple(map(int, losses.layer(i).rsplit("_", 2)[1:])) for i in range(7)]
    assert ends[0][0] == 0 and ends[-1][1] == 999
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(ends))
    for first, last in ends:
        assert losses.add([1.0], [first])[1] == losses.add([1.0], [last])[1]
