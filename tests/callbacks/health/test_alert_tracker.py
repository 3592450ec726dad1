"""Reported findings: new ones, worse ones, and those that come back."""

from __future__ import annotations

from lightning_aigc.callbacks.health.alerts.alert_tracker import FORGET_AFTER, AlertTracker
from lightning_aigc.callbacks.health.alerts.alerts import Finding, Level
from lightning_aigc.callbacks.health.checks import POLICIES


def finding(check: str = "vanishing", layer: str = "a.weight", level: Level = "warning") -> Finding:
    return Finding(check, layer, level, "message", "cause", "remedy")


def test_a_finding_is_an_info_first_then_confirmed_then_an_error_and_never_repeated() -> None:
    tracker = AlertTracker(POLICIES)
    said = [tracker.update(step, ["vanishing"], [finding()]) for step in range(10, 150, 10)]
    assert [(a.step, a.since, a.level) for alerts in said for a in alerts] == [
        (10, 10, "info"),
        (20, 10, "warning"),
        (100, 10, "error"),
    ]


def test_an_advice_that_lasts_stays_an_info() -> None:
    tracker = AlertTracker(POLICIES)
    said = [tracker.update(step, ["vanishing"], [finding(level="info")]) for step in range(30)]
    assert [a.level for alerts in said for a in alerts] == ["info"]


def test_a_break_starts_the_count_anew() -> None:
    tracker = AlertTracker(POLICIES)
    for step in range(5):
        tracker.update(2 * step, ["vanishing"], [finding()])
        tracker.update(2 * step + 1, ["vanishing"], [])
    assert tracker.update(10, ["vanishing"], []) == []
    assert not tracker.is_open("vanishing", "a.weight")


def test_after_long_enough_without_it_the_same_thing_is_news() -> None:
    tracker = AlertTracker(POLICIES)
    first = tracker.update(1, ["non_finite"], [finding("non_finite", level="error")])
    again = tracker.update(2, ["non_finite"], [finding("non_finite", level="error")])
    for step in range(FORGET_AFTER):
        tracker.update(3 + step, ["non_finite"], [])
    later = tracker.update(50, ["non_finite"], [finding("non_finite", level="error")])
    assert (len(first), len(again), len(later)) == (1, 0, 1)
    assert later[0].since == 50


def test_a_check_or_a_layer_that_was_not_looked_at_is_not_over() -> None:
    tracker = AlertTracker(POLICIES)
    tracker.update(1, ["loss_spike"], [finding("loss_spike", "a")], {"a"})
    tracker.update(2, ["vanishing"], [])
    tracker.update(3, ["loss_spike"], [], {"b"})
    assert tracker.is_open("loss_spike", "a")
    assert [a.level for a in tracker.update(4, ["loss_spike"], [finding("loss_spike", "a")], {"a"})] == ["warning"]


def test_two_layers_are_two_alerts() -> None:
    found = [finding(layer="a"), finding(layer="b")]
    assert [a.layer for a in AlertTracker(POLICIES).update(1, ["vanishing"], found)] == ["a", "b"]


def test_a_tracker_comes_back_from_its_state() -> None:
    tracker, other = AlertTracker(POLICIES), AlertTracker(POLICIES)
    tracker.update(10, ["vanishing"], [finding()])
    other.load(tracker.state())
    assert other.state() == tracker.state()
    assert [(a.since, a.level) for a in other.update(20, ["vanishing"], [finding()])] == [(10, "warning")]
