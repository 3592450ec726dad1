"""The article's table: its rows come from real runs on two hosts, its figures from the rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end.article_markdown import markdown

ROOT = Path(__file__).parents[1]


def row(arm: str, seed: int, scores: list[float], **more: Any) -> dict[str, Any]:
    checks = [{"step": 30 * n, "s": 3.0 * n, "clip_t": score, "se": 0.01} for n, score in enumerate(scores, 1)]
    measured = {"steps": 90, "start_s": 1.0, "total_s": 10.0, "kept_mib": 5.0, "peak_rss_mib": 700.0}
    measured |= {"sent_bytes_per_step": 16e6, "job": "full", "rate": "1gbit", "checks": checks}
    return {"arm": arm, "seed": seed} | measured | more


def cells(text: str, arm: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {arm} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_time_to_plains_best_is_the_first_check_of_the_same_seed_that_reaches_it() -> None:
    rows = [row("plain", 0, [0.3, 0.5, 0.4]), row("plain", 1, [0.3, 0.4, 0.6])]
    rows += [row("ours", 0, [0.5, 0.6, 0.6]), row("ours", 1, [0.3, 0.7, 0.6])]
    text = markdown(rows)
    assert cells(text, "plain")[1:4] == ["2", "7.5", "75"]
    assert cells(text, "ours")[1:4] == ["2", "4.5", "45"]
    assert cells(text, "ours")[4:7] == ["10.0", "1.0", "0.100"]


def test_a_run_that_never_reaches_it_says_so() -> None:
    rows = [row("plain", 0, [0.5]), row("ours", 0, [0.4]), row("plain", 1, [0.5]), row("ours", 1, [0.6])]
    assert cells(markdown(rows), "ours")[2] == "3.0 (1 of 2)"
    assert cells(markdown(rows[:2]), "ours")[2] == "never"


@pytest.mark.long
@pytest.mark.usefixtures("needs_namespaces")
def test_both_sides_train_on_two_hosts_and_a_row_is_not_made_twice(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.end_to_end.article_table", "--steps", "9", "--seeds", "0"]
    command += ["--jobs", "lora", "--arms", "plain", "ours", "--rate", "100mbit", "--output", str(output)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [found["arm"] for found in rows] == ["plain", "ours"]
    plain, ours = rows
    assert plain["trained"] == ours["trained"] and plain["steps"] == ours["steps"] == 9
    assert ours["sent_bytes_per_step"] < plain["sent_bytes_per_step"]
    assert ours["kept_mib"] < plain["kept_mib"]
    assert plain["sent_bytes_per_step"] > 4 * plain["trained"]  # a dense ring of two sends every gradient once
