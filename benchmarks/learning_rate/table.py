"""Format the rows of adaptive_lr.py as Markdown tables."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.learning_rate.training import CHECKS, SETTINGS, Cell

VARIANTS = ("fixed", "adaptive", "prodigy", "schedule_free")


def _listed(rows: list[dict[str, Any]]) -> str:
    """Score of every seed, in brackets if the run was stopped."""
    said = [f"({row['final']:.3f})" if row["ended_at"] else f"{row['final']:.3f}" for row in rows]
    return " ".join(said) + f" | {statistics.mean(row['final'] for row in rows):.3f}"


def _judged(differences: list[float]) -> str:
    """Mean of paired differences, its standard error, and the result of a two-sided 95 % t interval."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return f"{mean:+.3f} | "
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    quantile = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(differences), 2.0)
    verdict = "alike" if abs(mean) <= quantile * error else "better" if mean > 0 else "**worse**"
    return f"{mean:+.3f} ± {error:.3f} | {verdict}"


def table(rows: list[dict[str, Any]], seeds: list[int] | None = None) -> str:
    """Markdown table of all pairs, followed by the rows of the other variants."""
    by = {Cell.of_row(row): row for row in rows if seeds is None or row["seed"] in seeds}
    lines = [
        "| setting | rate | fixed, each seed | mean | AdaptiveLR, each seed | mean | difference | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    others = []
    every_seed = sorted({cell.seed for cell in by})
    for setting in reversed(SETTINGS):
        for times in sorted({cell.times for cell in by}):
            found = {
                variant: [by.get(Cell(setting, times, seed, variant)) for seed in every_seed] for variant in VARIANTS
            }
            rate = f"{SETTINGS[setting].rate:g} x {times:g}"
            pairs = [(a, b) for a, b in zip(found["fixed"], found["adaptive"], strict=True) if a and b]
            if pairs:
                differences = [b["final"] - a["final"] for a, b in pairs]
                lines.append(
                    f"| {setting} | {rate} | {_listed([a for a, _ in pairs])} | {_listed([b for _, b in pairs])} "
                    f"| {_judged(differences)} |"
                )
            for variant in VARIANTS[2:]:
                if there := [row for row in found[variant] if row]:
                    others.append(f"| {setting} | {variant} x {times:g} | {_listed(there)} |")
    if others:
        lines += ["", "| setting | variant | each seed | mean |", "|---|---|---|---|", *others]
    return "\n".join(lines)


def goals(rows: list[dict[str, Any]]) -> str:
    """Steps to the best score that the fixed schedule reached at the config's rate, from runs with --every."""
    by = {Cell.of_row(row): row for row in rows if len(row["curve"]) > len(CHECKS)}
    lines = ["| setting | variant | steps to the goal, each seed | median |", "|---|---|---|---|"]
    for setting, variant, times in sorted({(c.setting, c.variant, c.times) for c in by}):
        steps = []
        for seed in sorted({cell.seed for cell in by}):
            row, fixed = by.get(Cell(setting, times, seed, variant)), by.get(Cell(setting, 1.0, seed, "fixed"))
            if row and fixed:
                goal = max(score for _, score in fixed["curve"])
                steps.append(next((step for step, score in row["curve"] if score >= goal), math.inf))
        if steps:
            said = " ".join("-" if math.isinf(step) else str(step) for step in steps)
            lines.append(f"| {setting} | {variant} x {times:g} | {said} | {statistics.median(steps):g} |")
    return "\n".join(lines) if len(lines) > 2 else ""
