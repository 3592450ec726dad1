"""The decisions about a learning rate, on numbers alone."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_aigc.errors import ConfigError
from lightning_aigc.schedulers.detectors import LOSS_STEPS, MIN_STEPS
from lightning_aigc.schedulers.rate_control import LOWEST_SHARE, RateControl, RateSettings
from lightning_aigc.schedulers.step_statistics import LastStep

CALM = 0.1
NORMS = st.floats(0.0, 1e30, allow_nan=False)


def settled(**settings: Any) -> RateControl:
    control = RateControl(RateSettings(search=False, **settings))
    for _ in range(20):
        control.update(CALM, None)
    return control


def go_on(control: RateControl, steps: int, norm: float = CALM, loss: float = math.nan) -> list[str]:
    """The reasons for changes in so many steps."""
    reasons = [control.update(norm, None, loss) for _ in range(steps)]
    return [reason for reason in reasons if reason is not None]


def test_no_search_starts_at_the_schedule_itself() -> None:
    control = RateControl(RateSettings(search=False))
    assert control.factor == 1.0
    control.update(CALM, LastStep(-1.0, 0.01))
    assert control.factor == 1.0


# Peaks


def test_a_peak_cuts_and_is_made_up_for_in_recovery_steps() -> None:
    control = settled(recovery_factor=0.5, recovery_steps=10)
    assert control.update(4.6 * CALM, None) is not None  # e^(6 * 0.25) = 4.48 in a run that hardly varies
    assert control.factor == 0.5
    reasons = [control.update(CALM, None) for _ in range(11)]
    assert control.factor == 1.0
    assert [reason is not None for reason in reasons].index(True) in (9, 10)
    assert control.update(4.3 * CALM, None) is None


def test_a_peak_is_judged_by_how_much_the_run_varies() -> None:
    """Batches of one: norms ten times their median are usual there."""
    generator = random.Random(0)
    control = RateControl(RateSettings(search=False))
    norms = [math.exp(generator.gauss(0.0, 1.0)) for _ in range(1000)]
    assert max(norms) > 10
    reasons = [control.update(norm, None) for norm in norms]
    assert not any(reasons)
    assert "6 robust deviations above the run's median" in (control.update(1e4, None) or "")


@pytest.mark.parametrize("search", [False, True])
def test_peaks_that_come_before_the_rate_has_recovered_do_not_lower_what_it_comes_back_to(search: bool) -> None:
    control = RateControl(RateSettings(search=search))
    for step in range(2000):
        peak = 8.0 if step % 30 == 29 else 1.0
        control.update(CALM * peak, LastStep(0.15, 0.01))
        if step > 100:
            assert 0.5 * control.top <= control.factor <= control.top == (30.0 if search else 1.0)
    go_on(control, 60)
    assert control.factor == control.top


def test_a_peak_costs_one_cut_in_recovery_steps_however_long_it_lasts() -> None:
    control = settled(recovery_steps=10)
    assert len([reason for reason in go_on(control, 20, norm=100 * CALM) if "above" in reason]) <= 2
    assert control.factor >= 0.5
    go_on(control, 200, norm=100 * CALM)
    assert control.factor == 1.0


def test_an_absolute_threshold_counts_from_the_first_step_on() -> None:
    control = RateControl(RateSettings(search=False, grad_norm_threshold=1.5, relative=False))
    assert control.update(1.4, None) is None
    assert "1.5, the threshold" in (control.update(1.6, None) or "")
    assert control.factor == 0.5


def test_a_norm_that_is_always_above_an_absolute_threshold_is_the_run_s_normal() -> None:
    control = RateControl(RateSettings(search=False, grad_norm_threshold=1.5, relative=False))
    generator = random.Random(1)
    reasons = [control.update(10.0 * math.exp(generator.gauss(0.0, 0.3)), None) for _ in range(500)]
    assert [i for i, reason in enumerate(reasons) if reason and "above" in reason] == [0]
    assert control.factor == 1.0
    assert "robust deviations" in (control.update(1000.0, None) or "")
    go_on(control, 400, norm=0.5)
    assert "2 is above 1.5, the threshold" in (control.update(2.0, None) or "")  # a run that came down has it again


@given(
    st.lists(NORMS, max_size=300),
    st.sampled_from([(6.0, True), (1.5, False), (1e-3, False)]),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.integers(1, 60),
    st.booleans(),
)
def test_without_a_diverging_loss_the_factor_is_bounded_below_and_comes_back_whatever_the_norms(
    norms: list[float], threshold: tuple[float, bool], recovery_factor: float, recovery_steps: int, search: bool
) -> None:
    control = RateControl(RateSettings(search, *threshold, recovery_factor, recovery_steps))
    cuts, is_low = [], False
    for step, norm in enumerate(norms):
        was_searching = control.is_searching
        control.update(norm, None, loss=1.0)
        assert control.top * recovery_factor <= control.factor <= control.top
        if not was_searching:
            assert control.top == 1.0  # no step was measured, so the search has found nothing
            if control.factor < 1.0 and not is_low:
                cuts.append(step)
        is_low = control.factor < control.top
    assert all(later - earlier >= recovery_steps for earlier, later in itertools.pairwise(cuts))
    go_on(control, 400, norm=1.0, loss=1.0)  # calm, and long enough for the last hundred norms and the search to end
    assert control.factor == control.top == 1.0


# A loss that diverges


def test_only_a_diverging_loss_lowers_the_rate_found_and_its_plateau_does_not_go_on_lowering_it() -> None:
    control = settled()
    go_on(control, 2 * LOSS_STEPS, loss=0.1)
    assert control.top == 1.0
    [reason] = go_on(control, 200, loss=0.5)
    assert "diverges" in reason
    assert control.top == control.factor == 0.5
    go_on(control, 200, loss=0.1)
    assert control.factor == 0.5


def test_a_loss_that_goes_on_rising_lowers_it_further_down_to_a_floor() -> None:
    control = settled()
    for step in range(3000):
        control.update(CALM, None, loss=1.01**step)
    assert control.top == control.factor == LOWEST_SHARE


def test_losses_of_batches_of_one_scatter_without_diverging() -> None:
    for seed in range(10):
        generator = random.Random(seed)
        control = settled()
        for _ in range(1000):
            control.update(CALM, None, loss=0.1 * math.exp(generator.gauss(0.0, 1.0)))
        assert control.top == 1.0


def test_losses_below_zero_may_fall_and_rise_out_of_their_spread_too() -> None:
    control = settled()
    go_on(control, LOSS_STEPS, loss=-3.0)
    go_on(control, 2 * LOSS_STEPS, loss=-9.0)
    assert control.top == 1.0
    go_on(control, 2 * LOSS_STEPS, loss=4.0)
    assert control.top == 0.5


# Search


def test_a_peak_during_the_search_is_a_smaller_step_and_the_search_goes_on() -> None:
    control = RateControl(RateSettings())
    for _ in range(MIN_STEPS + 2):
        control.update(CALM, LastStep(0.1, 0.01))
    reached = control.top
    control.update(10.0, LastStep(0.1, 0.01))
    assert control.is_searching
    assert control.factor == pytest.approx(reached / 2)
    control.update(CALM, LastStep(0.1, 0.01))
    assert control.factor == control.top > reached


def test_an_absolute_threshold_below_the_run_s_norms_does_not_end_the_search() -> None:
    control = RateControl(RateSettings(grad_norm_threshold=1.5, relative=False))
    for _ in range(60):
        control.update(20.0, LastStep(0.15 * (1 - control.top / 3.0), 0.01))
    assert not control.is_searching
    assert 2.0 < control.factor < 6.0


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_decides_nothing(norm: float) -> None:
    control = settled()
    before = control.state_dict()
    assert control.update(norm, None) is None
    assert control.state_dict() == before


def test_its_state_goes_on_where_it_was() -> None:
    for looked_at in (12, 60):  # in the search, and after it
        control, other = RateControl(RateSettings()), RateControl(RateSettings())

        def step(control: RateControl, i: int) -> tuple[Any, Any]:
            norm = 9.0 if i == 70 else CALM * (1 + i % 3)
            reason = control.update(norm, LastStep(0.15 * (1 - control.top), 0.01), loss=0.1 + (i > 80))
            return reason, control.state_dict()

        for i in range(looked_at):
            step(control, i)
        other.load_state_dict(control.state_dict())
        assert [step(control, i) for i in range(looked_at, 150)] == [step(other, i) for i in range(looked_at, 150)]
        assert control.top == 0.5 * control.found


@pytest.mark.parametrize("is_searching", [False, True])
def test_a_state_of_the_older_form_goes_on_at_its_rate(is_searching: bool) -> None:
    control = RateControl(RateSettings())
    older = {"is_searching": is_searching, "top": 0.25, "factor": 0.2, "agreement": [0.0, 0.0, 3], "is_peak": False}
    control.load_state_dict(older | {"norms": [CALM, 0.0, CALM]})
    assert (control.is_searching, control.top) == (is_searching, 0.25)
    control.update(CALM, LastStep(0.1, 0.01))
    assert control.top >= 0.25


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
