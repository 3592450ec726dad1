"""docs/guide.md: each pitfall in short form, and the line that detects it; a healthy run prints none of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.guide import commands as guide
from tools.guide import pitfalls
from tools.guide import run as guide_run

ROOT = Path(__file__).parents[2]

PAGE = ROOT / "docs" / "guide.md"
ROWS = {row["pitfall"]: row for row in map(json.loads, guide.ROWS.read_text(encoding="utf-8").splitlines())}
EACH = pytest.mark.parametrize("pitfall", pitfalls.PITFALLS, ids=lambda p: p.name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guide")


@pytest.mark.long
@EACH
def test_the_short_form_of_a_pitfall_is_detected_by_its_line(pitfall: Any, root: Path) -> None:
    run = guide.run_pitfall(pitfall, root, is_short=True, is_cured=False)
    assert run.line(pitfall.detects), run.output[-3000:]


@pytest.mark.long
def test_a_healthy_run_prints_no_line_of_any_pitfall(root: Path) -> None:
    short = {k: v for k, v in pitfalls.SHORT.items() if k != "data.init_args.class_data_dir"}
    arguments = short | {"model.init_args.max_train_steps": "40", "model.init_args.num_inference_steps": "8"}
    run = guide_run.run(guide_run.command(None, arguments, root / "healthy"), root / "healthy")
    assert run.exit_code == 0, run.output[-3000:]
    assert run.figures
    assert {p.name: run.line(p.detects) for p in pitfalls.PITFALLS if run.line(p.detects)} == {}


@EACH
def test_the_kept_row_was_detected_and_its_cure_was_quiet(pitfall: Any) -> None:
    row = ROWS[pitfall.name]
    assert re.search(pitfall.detects, row["detected"])
    assert row["quiet_when_cured"]


@EACH
def test_the_page_shows_the_line_the_overlay_and_a_small_picture(pitfall: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = page[page.index(f"## {pitfall.title}\n") :].split("\n## ")[1 if page.startswith("## ") else 0]
    shown = " ".join(section.split())
    assert " ".join(ROWS[pitfall.name]["detected"].split()) in shown
    assert f"configs/guide/{pitfall.name}.yaml" in section
    assert all(value.replace("{data}", "runs/guide/data") in section for value in pitfall.cure.values())
    picture = ROOT / "docs" / "images" / "guide" / f"{pitfall.name}.png"
    assert f"images/guide/{pitfall.name}.png" in section
    assert picture.stat().st_size < 60_000


def test_the_page_has_the_measured_heights_of_text_and_faces() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"{ROWS['text']['least_height']} pixels" in page
    for row in (ROWS["text"], ROWS["faces"]):
        for height, kept in row["kept"].items():
            if int(height) >= 8:
                assert re.search(rf"\| {height} \|.*\b{kept:.0%}", page), (row["pitfall"], height)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "guide").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_overlay_belongs_to_a_pitfall_and_changes_values_only(path: Path) -> None:
    assert path.stem == "common" or path.stem in pitfalls.BY_NAME
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content.keys() <= {"trainer", "model", "data"}
