"""tools/check_demo.py names each bar that a demo run misses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.check_demo import failures

FILES = ("zorp.safetensors", "zorp_best.safetensors", "report.html", "health.html")


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    for name in FILES:
        (tmp_path / name).write_text("")
    scores = {"clip_t_before": 0.3, "clip_t_after": 0.8, "prior_clip_t_before": 0.9, "prior_clip_t_after": 0.9}
    return scores | {"lora_file": str(tmp_path / FILES[0]), "report": str(tmp_path / FILES[2])}


def test_a_good_run_misses_nothing(summary: dict[str, Any]) -> None:
    assert failures(summary) == []


@pytest.mark.parametrize("missing", FILES)
def test_a_run_without_one_of_its_files_fails(summary: dict[str, Any], tmp_path: Path, missing: str) -> None:
    (tmp_path / missing).unlink()
    (said,) = failures(summary)
    assert missing in said


@pytest.mark.parametrize("worse", [{"clip_t_after": 0.69}, {"prior_clip_t_after": 0.8}])
def test_a_run_below_a_bar_fails(summary: dict[str, Any], worse: dict[str, float]) -> None:
    assert len(failures(summary | worse)) == 1
