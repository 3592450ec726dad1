"""What is said once, what is said again, and what gets worse."""

from __future__ import annotations

from lightning_aigc.callbacks.health.alert import Check, Finding, Level
from lightning_aigc.callbacks.health.ledger import FORGET_AFTER, Ledger


def finding(check: Check = "vanishing", layer: str = "a.weight", level: Level = "warning") -> Finding:
    return Finding(check, layer, level, "message", "cause", "remedy")


def test_a_finding_is_an_info_first_then_confirmed_then_an_error_and_never_repeated() -> None:
    ledger = Ledger()
    said = [ledger.update(step, ["vanishing"], [finding()]) for step in range(10, 150, 10)]
    assert [(a.step, a.since, a.level) for alerts in said for a in alerts] == [
        (10, 10, "info"),
        (20, 10, "warning"),
        (100, 10, "error"),
    ]


def test_an_advice_that_lasts_stays_an_info() -> None:
    ledger = Ledger()
    said = [ledger.update(step, ["vanishing"], [finding(level="info")]) for step in range(30)]
    assert [a.level for alerts in said for a in alerts] == ["info"]


def test_a_break_starts_the_count_anew() -> None:
    ledger = Ledger()
    for step in range(5):
        ledger.update(2 * step, ["vanishing"], [finding()])
        ledger.update(2 * step + 1, ["vanishing"], [])
    assert ledger.update(10, ["vanishing"], []) == []
    assert not ledger.is_open("vanishing", "a.weight")


def test_after_long_enough_without_it_the_same_thing_is_news() -> None:
    ledger = Ledger()
    first = ledger.update(1, ["non_finite"], [finding("non_finite", level="error")])
    again = ledger.update(2, ["non_finite"], [finding("non_finite", level="error")])
    for step in range(FORGET_AFTER):
        ledger.update(3 + step, ["non_finite"], [])
    later = ledger.update(50, ["non_finite"], [finding("non_finite", level="error")])
    assert (len(first), len(again), len(later)) == (1, 0, 1)
    assert later[0].since == 50


def test_a_check_or_a_layer_that_was_not_looked_at_is_not_over() -> None:
    ledger = Ledger()
    ledger.update(1, ["loss_spike"], [finding("loss_spike", "a")], {"a"})
    ledger.update(2, ["vanishing"], [])
    ledger.update(3, ["loss_spike"], [], {"b"})
    assert ledger.is_open("loss_spike", "a")
    assert [a.level for a in ledger.update(4, ["loss_spike"], [finding("loss_spike", "a")], {"a"})] == ["warning"]


def test_two_layers_are_two_alerts() -> None:
    found = [finding(layer="a"), finding(layer="b")]
    assert [a.layer for a in Ledger().update(1, ["vanishing"], found)] == ["a", "b"]


def test_a_ledger_comes_back_from_its_state() -> None:
    ledger, other = Ledger(), Ledger()
    ledger.update(10, ["vanishing"], [finding()])
    other.load(ledger.state())
    assert other.state() == ledger.state()
    assert [(a.since, a.level) for a in other.update(20, ["vanishing"], [finding()])] == [(10, "warning")]
