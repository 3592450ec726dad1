"""The decisions about a learning rate, on numbers alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_aigc.errors import ConfigError
from lightning_aigc.schedulers.rate_control import LOWEST_CUT, SEARCH_GROWTH, SEARCH_START, RateControl, RateSettings
from lightning_aigc.schedulers.step_measure import LastStep

CALM = 0.1


def step(agreement: float, share: float = 0.01) -> LastStep:
    return LastStep(agreement, share)


def step_at(multiple: float, best: float) -> LastStep:
    """What a step of a rate says: it agrees well below the best rate, and overshoots above it."""
    return step(0.15 * (1 - multiple / best))


def search(best: float, **settings: Any) -> RateControl:
    control = RateControl(RateSettings(**settings))
    for _ in range(60):
        control.look(CALM, step_at(control.top, best))
    return control


@pytest.mark.parametrize("best", [0.01, 0.05, 0.3, 1.0, 3.0, 10.0])
def test_the_search_ends_near_the_rate_where_steps_overshoot_wherever_that_is(best: float) -> None:
    control = search(best)
    assert not control.is_searching
    assert 0.5 < control.factor / best < 2.0


def test_a_search_without_an_end_stops_at_max_raise() -> None:
    control = search(math.inf, max_raise=7.0)
    assert (control.is_searching, control.factor) == (False, 7.0)


def test_a_rate_that_overshoots_from_the_first_step_on_is_brought_down_first() -> None:
    control = RateControl(RateSettings())
    for _ in range(6):
        control.look(CALM, step(-0.1))
    assert control.is_searching
    assert control.factor < 0.01


def test_a_step_that_changes_the_weights_by_much_ends_the_search_whatever_it_agrees_with() -> None:
    control = RateControl(RateSettings())
    for _ in range(8):
        control.look(CALM, step(0.1))
    reached = control.factor
    assert "changed the trained weights by 12%" in (control.look(CALM, step(0.1, share=0.12)) or "")
    assert (control.is_searching, control.factor) == (False, reached / 2)


def test_no_search_starts_at_the_schedule_itself() -> None:
    control = RateControl(RateSettings(search=False))
    assert control.factor == 1.0
    control.look(CALM, step(-1.0))
    assert control.factor == 1.0


def settled(**settings: Any) -> RateControl:
    control = RateControl(RateSettings(search=False, **settings))
    for _ in range(20):
        control.look(CALM, None)
    return control


def test_a_norm_above_its_running_median_cuts_and_is_made_up_for_in_recovery_steps() -> None:
    control = settled(recovery_factor=0.5, recovery_steps=10)
    assert control.look(4.1 * CALM, None) is not None
    assert control.factor == 0.5
    reasons = [control.look(CALM, None) for _ in range(11)]
    assert control.factor == 1.0
    assert [reason is not None for reason in reasons].index(True) in (9, 10)
    assert control.look(3.9 * CALM, None) is None


def test_an_absolute_threshold_counts_from_the_first_step_on() -> None:
    control = RateControl(RateSettings(search=False, grad_norm_threshold=1.5, relative=False))
    assert control.look(1.4, None) is None
    assert "1.5" in (control.look(1.6, None) or "")
    assert control.factor == 0.5


def test_a_second_peak_on_the_way_back_lowers_what_the_rate_comes_back_to() -> None:
    control = settled(recovery_steps=10)
    control.look(1.0, None)
    for _ in range(5):
        control.look(CALM, None)
    level = control.factor
    control.look(1.0, None)
    assert control.factor == pytest.approx(level / 2)
    for _ in range(30):
        control.look(CALM, None)
    assert control.factor == pytest.approx(level)


def test_one_peak_of_many_steps_cuts_down_to_a_floor_and_is_forgotten() -> None:
    control = settled(grad_norm_threshold=1.0, relative=False, recovery_steps=10)
    for _ in range(50):
        control.look(10.0, None)
    assert control.factor == LOWEST_CUT
    for _ in range(70):
        control.look(CALM, None)
    assert control.factor == 1.0


def test_a_peak_during_the_search_ends_it_below_the_rate_it_had_reached() -> None:
    control = RateControl(RateSettings())
    for _ in range(12):
        control.look(CALM, step(0.1))
    reached = control.factor
    control.look(10.0, step(0.1))
    assert not control.is_searching
    assert control.factor == pytest.approx(reached * SEARCH_GROWTH / 2)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_decides_nothing(norm: float) -> None:
    control = settled()
    before = control.state_dict()
    assert control.look(norm, None) is None
    assert control.state_dict() == before


def test_its_state_goes_on_where_it_was() -> None:
    control, other = RateControl(RateSettings()), RateControl(RateSettings())
    numbers: list[tuple[float, LastStep | None]] = [
        (CALM * (1 + i % 3), step_at(SEARCH_START * SEARCH_GROWTH**i, 1.0)) for i in range(12)
    ]
    for norm, last in numbers:
        control.look(norm, last)
    other.load_state_dict(control.state_dict())
    for norm, last in [*numbers, (9.0, None), (CALM, None)]:
        assert control.look(norm, last) == other.look(norm, last)
        assert control.state_dict() == other.state_dict()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"grad_norm_threshold": 0.0}, "grad_norm_threshold must be a number above 0, or null; got 0.0"),
        ({"recovery_factor": 1.0}, "recovery_factor must be a number between 0 and 1; got 1.0"),
        ({"recovery_steps": 0}, "recovery_steps must be at least 1; got 0"),
        ({"max_raise": 0.0}, "max_raise must be"),
    ],
)
def test_a_setting_out_of_range_says_what_is_wanted(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RateSettings(**settings)
