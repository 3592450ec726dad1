"""Quantities as people write them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from lightning_aigc.cli.quantities import as_time, bytes_a_second, count, latency, seconds, with_scale


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (bytes_a_second, "25Gb", 25e9 / 8), (bytes_a_second, "200GB", 200e9), (bytes_a_second, "1GbE", 1e9 / 8),
        (bytes_a_second, "100 Gbit/s", 12.5e9), (bytes_a_second, "1.5 TB/s", 1.5e12), (bytes_a_second, "800Mb", 1e8),
        (seconds, "1.2", 1.2), (seconds, "350ms", 0.35), (seconds, "30us", 3e-5), (seconds, "2 s", 2),
        (latency, "5us", 5e-6),
        (count, "859.5M", 859.5e6), (count, "2.6B", 2.6e9), (count, "12_800_000", 12.8e6), (count, "1e6", 1e6),
    ],
)  # fmt: skip
def test_units_are_understood(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (bytes_a_second, "25"), (bytes_a_second, "25gb"), (bytes_a_second, "0Gb"), (bytes_a_second, "-1Gb"),
        (bytes_a_second, "1e400Gb"), (count, "1e400"), (seconds, "1e400"), (latency, "5"), (latency, "5 h"),
        (seconds, "1h"), (seconds, ""), (count, "many"), (count, "-5M"),
    ],
)  # fmt: skip
def test_what_is_not_understood_says_what_would_be(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted"):
        parse(text)


def test_numbers_are_printed_with_their_scale() -> None:
    assert [with_scale(x, "B") for x in (3.44e9, 999, 0)] == ["3.44 GB", "999 B", "0 B"]
    assert with_scale(859.5e6) == "860 M"
    assert [as_time(x) for x in (1.234, 0.0456, 3e-5, 0)] == ["1.23 s", "45.6 ms", "30 us", "0"]
