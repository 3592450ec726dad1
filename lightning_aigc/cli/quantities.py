"""Parse and format quantities with units for the command line: 25Gb, 200GB/s, 30us, 859.5M."""

from __future__ import annotations

import argparse
import math
import re

SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*"


def _finite(unit: str, text: str) -> re.Match[str] | None:
    """Match a finite number and the pattern of a unit."""
    match = re.fullmatch(_NUMBER + unit, text.strip())
    return match if match is not None and math.isfinite(float(match[1])) else None


def bytes_a_second(text: str) -> float:
    """Parse a bandwidth, 25Gb as 25e9 bits/s, 200GB as 200e9 bytes/s. Raises: ArgumentTypeError."""
    match = _finite(r"([kMGT]?)(b|bit|B)(?:it)?(?:/s|ps|E)?", text)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted a bandwidth above 0 with its unit: 25Gb (bits a second) or 200GB (bytes a second)"
        )
    return float(match[1]) * SCALES[match[2]] / (1 if match[3] == "B" else 8)


def seconds(text: str) -> float:
    """Parse a time such as 1.2, 1.2s, 350ms, 30us or 5ns. Raises: ArgumentTypeError."""
    match = _finite(r"([mµun]?s|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a time such as 1.2, 350ms or 30us")
    return float(match[1]) * SECONDS[match[2] or "s"]


def latency(text: str) -> float:
    """Parse a time with its unit, such as 30us: 5 alone would be seconds. Raises: ArgumentTypeError."""
    if not text.strip().endswith("s"):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a latency with its unit, such as 30us")
    return seconds(text)


def count(text: str) -> float:
    """Parse a count with k, M, G (or B) or T, 859.5M as 859,500,000. Raises: ArgumentTypeError."""
    match = _finite(r"([kMGBT]?)", text.replace("_", "").replace(",", ""))
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number of parameters such as 859.5M or 12_800_000")
    return float(match[1]) * SCALES[match[2].replace("B", "G")]


def with_scale(value: float, unit: str = "") -> str:
    """Format with three digits and a decimal prefix: 3.44 GB."""
    prefix = next((name for name in "TGMk" if abs(value) >= SCALES[name]), "")
    return f"{value / SCALES[prefix]:.3g} {prefix}{unit}".rstrip()


def as_time(value: float) -> str:
    """Format a time: 1.23 s, 45.6 ms, 30 us."""
    for unit in ("s", "ms", "us"):
        if abs(value) >= SECONDS[unit]:
            return f"{value / SECONDS[unit]:.3g} {unit}"
    return "0" if value == 0 else f"{value / 1e-9:.3g} ns"
