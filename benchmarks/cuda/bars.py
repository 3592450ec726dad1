"""Targets for the figures of bench_cuda.py, and rows read from the files that a section writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


LEVELS = {"balanced": (0.60, 1.00), "lean": (0.25, 1.08), "max": (0.12, 1.40)}
"""Limits of a memory level on SD 1.5, over native: kept activations and step time. SDXL's are 0.03 higher."""
COPY_SHARE, SCRIPT_MEMORY, SCRIPT_TIME, BLOCKED_SHARE, MONITOR_MS, HIDDEN_SHARE = 0.80, 0.35, 1.00, 0.05, 1.0, 0.9


@dataclass(frozen=True)
class Bar:
    """One figure and its target."""

    what: str
    got: float
    wanted: float
    at_least: bool = False

    @property
    def held(self) -> bool:
        return self.got >= self.wanted if self.at_least else self.got <= self.wanted

    def __str__(self) -> str:
        mark = "held  " if self.held else "MISSED"
        return f"{mark} {self.what}: {self.got:g}, wanted {'at least' if self.at_least else 'at most'} {self.wanted:g}"


def level_bars(rows: list[Row]) -> list[Bar]:
    found = []
    for row in rows:
        if row.get("variant") in LEVELS:
            more = 0.03 if row["model"] == "sdxl" else 0.0
            name = f"{row['model']} batch {row['batch']} {row['variant']}"
            kept, step_time = LEVELS[row["variant"]]
            found.append(Bar(f"{name}, kept / native", row["kept_ratio"], round(kept + more, 3)))
            for key in ("step_time_ratio", "device_time_ratio"):
                if key in row:
                    found.append(Bar(f"{name}, {key}", row[key], round(step_time + more, 3)))
    return found


GRAPHED = {"sd15": 0.22, "sdxl": 0.25}
"""Limit of a graphed step at lean, batch 1, over eager native's."""


def _difference_bar(what: str, row: Row, of_repeated: float) -> Bar:
    """No difference where the kernels repeat their bits, else a small one."""
    return Bar(what, row["gradient_difference"], 0.0 if of_repeated == 0 else 0.02)


def graph_bars(rows: list[Row]) -> list[Bar]:
    found = []
    for row in rows:
        name = f"{row['model']} batch {row['batch']} {row['variant']}, {row['shapes']} shapes"
        is_barred = row["variant"] == "lean" and row["batch"] == 1 and row["model"] in GRAPHED
        if is_barred and "graphed_over_eager_native" in row:
            found.append(
                Bar(f"{name}, graphed / eager native", row["graphed_over_eager_native"], GRAPHED[row["model"]])
            )
        if "graphed_over_device_time" in row and row["shapes"] == 1:
            found.append(Bar(f"{name}, graphed / the card's time", row["graphed_over_device_time"], 1.10))
        if "reserved_ratio" in row:
            limit = 1.10 if row["shapes"] == 1 else 1.15
            found.append(Bar(f"{name}, reserved memory / eager's", row["reserved_ratio"], limit))
        if "gradient_difference" in row:
            found.append(_difference_bar(f"{name}, gradients' difference from eager's", row, row["eager_difference"]))
    return found


def bandwidth_bars(rows: list[Row]) -> list[Bar]:
    return [
        Bar(
            f"{row['shape']}{' trained' * row['trained']} {way}, of a copy",
            row[f"ours_{way}_of_copy"],
            COPY_SHARE,
            True,
        )
        for row in rows
        for way in ("forward", "backward")
    ]


def script_bars(rows: list[Row]) -> list[Bar]:
    found = []
    for row in rows:
        name = f"batch {row['batch']} {row['variant']}"
        if row["variant"] in ("lean", "max"):
            found.append(Bar(f"{name}, peak / diffusers' script in bf16", row["ratio"], SCRIPT_MEMORY))
        if "step_ratio" in row and not row["variant"].startswith("diffusers"):
            found.append(Bar(f"{name}, step time / diffusers' script", row["step_ratio"], SCRIPT_TIME))
    return found


def tests_of(folder: Path) -> list[Row]:
    """One row per pytest run, from its junit file."""
    import xml.etree.ElementTree as ET

    rows = []
    for path in sorted(folder.glob("tests-*.xml")):
        suite = next(ET.parse(path).getroot().iter("testsuite"))
        count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        failed = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        rows.append({"benchmark": "tests", **count, "seconds": float(suite.get("time", 0)), "failed": failed[:40]})
    return rows


def tests_bars(rows: list[Row]) -> list[Bar]:
    ran = sum(row["tests"] - row["skipped"] for row in rows)
    return [
        Bar("tests that failed", sum(row["failures"] + row["errors"] for row in rows), 0),
        Bar("tests that ran", ran, 1, at_least=True),
    ]


def demo_of(folder: Path) -> list[Row]:
    path = folder / "demo" / "summary.json"
    return [{"benchmark": "demo", **json.loads(path.read_text())}] if path.is_file() else []


def demo_bars(rows: list[Row]) -> list[Bar]:
    return [
        bar
        for row in rows
        for bar in (
            Bar("demo, CLIP-T rose by", round(row["clip_t_after"] - row["clip_t_before"], 3), 0.4, True),
            Bar(
                "demo, other prompts kept", round(row["prior_clip_t_after"] / row["prior_clip_t_before"], 3), 0.9, True
            ),
        )
    ]


def snapshot_bars(rows: list[Row]) -> list[Bar]:
    names = ("callback_ratio", "blocked_late_ratio")
    return [Bar(f"snapshots, {name}", row[name], BLOCKED_SHARE) for row in rows for name in names if name in row]


def streamed_bars(rows: list[Row]) -> list[Bar]:
    found = []
    for row in rows:
        name = f"{row['model']} {row['pixels']} px {row['base'] or 'bf16'}, {row['share']:g} on the device"
        found.append(Bar(f"{name}, share of the copies hidden", row["hidden_share"], HIDDEN_SHARE, True))
        what = f"{name}, gradients' difference from resident"
        found.append(_difference_bar(what, row, row["resident_difference"]))
    return found


def monitor_bars(rows: list[Row]) -> list[Bar]:
    return [
        Bar(f"monitor, CPU ms between looks ({row['kind']})", row["cpu_between_looks_ms"], MONITOR_MS) for row in rows
    ]
