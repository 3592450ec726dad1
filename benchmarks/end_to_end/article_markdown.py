"""Format the rows of article_table.py as Markdown tables."""

from __future__ import annotations

import statistics
from typing import Any

Row = dict[str, Any]
HEAD = (
    "arm", "seeds", "to plain's best, s", "steps to it", "whole run, s", "before step 1, s", "s a step", "steps taken",
    "best CLIP-T", "kept MiB", "peak RSS MiB", "kB a step",
)  # fmt: skip


def markdown(rows: list[Row]) -> str:
    """One table per job and rate; each figure is the mean over the seeds of the arm."""
    parts = []
    for job, rate in sorted({(row["job"], row["rate"]) for row in rows}):
        found = [row for row in rows if (row["job"], row["rate"]) == (job, rate)]
        arms = list(dict.fromkeys(row["arm"] for row in found))
        lines = [f"**{job}, {rate}**", "", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
        lines += [line(arm, [row for row in found if row["arm"] == arm], found) for arm in arms]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def line(arm: str, rows: list[Row], all_rows: list[Row]) -> str:
    """Table line of one arm."""
    reached = [reaches_plain(row, all_rows) for row in rows]
    seconds = [check["s"] for check in reached if check is not None]
    steps = [check["step"] for check in reached if check is not None]
    never = f" ({len(seconds)} of {len(rows)})" if len(seconds) < len(rows) else ""
    bests = [best(row)["clip_t"] for row in rows]
    spread = f" ({min(bests):.3f} to {max(bests):.3f})" if len(bests) > 1 else f" ± {best(rows[0])['se']:.3f}"
    values = [
        arm,
        str(len(rows)),
        (f"{statistics.mean(seconds):.1f}" if seconds else "never") + (never if seconds else ""),
        f"{statistics.mean(steps):.0f}" if steps else "never",
        f"{mean(rows, 'total_s'):.1f}",
        f"{mean(rows, 'start_s'):.1f}",
        f"{statistics.mean((row['total_s'] - row['start_s']) / row['steps'] for row in rows):.3f}",
        f"{mean(rows, 'steps'):.0f}",
        f"{statistics.mean(bests):.3f}{spread}",
        f"{mean(rows, 'kept_mib'):.1f}",
        f"{mean(rows, 'peak_rss_mib'):.0f}",
        f"{mean(rows, 'sent_bytes_per_step') / 1e3:.0f}",
    ]
    return f"| {' | '.join(values)} |"


def best(row: Row) -> dict[str, float]:
    """The first check with the highest score."""
    found: dict[str, float] = max(row["checks"], key=lambda check: check["clip_t"])
    return found


def reaches_plain(row: Row, rows: list[Row]) -> dict[str, float] | None:
    """The first check that reaches the best score of plain with the same seed; None if none does."""
    plain = next((other for other in rows if other["arm"] == "plain" and other["seed"] == row["seed"]), None)
    if plain is None:
        return None
    return next((check for check in row["checks"] if check["clip_t"] >= best(plain)["clip_t"]), None)


def mean(rows: list[Row], key: str) -> float:
    return float(statistics.mean(row[key] for row in rows))
