"""Pages of real runs in a real browser: charts are drawn, nothing is asked for, a phone need not scroll sideways."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fakes.chromium import Chromium, Opened
from lightning_aigc.report.record import read_run
from lightning_aigc.report.run_page import render_run_page

pytestmark = pytest.mark.browser

REPO = Path(__file__).parents[2]
CALLBACKS = """
trainer:
  callbacks:
    - class_path: RunReport
      init_args: {clip_model: embedded:clip, prompts: [a zorp mug], prior_prompts: [a red mug on white], num_images: 2}
    - class_path: GradientHealthMonitor
      init_args: {every_n_steps: 2}
    - class_path: AdaptiveLR
    - class_path: CLIPConvergenceGuard
      init_args: {every_n_steps: 4, clip_model: embedded:clip, num_images: 2}
"""
WIDTHS, SCHEMES = (390, 1280), ("light", "dark")


def lightning(*arguments: object) -> str:
    """Run the command in a process of its own and return what it printed."""
    paths = os.pathsep.join(str(path) for path in (REPO, REPO / "kernels"))
    done = subprocess.run(
        [sys.executable, "-m", "lightning_aigc", *map(str, arguments)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two short real runs, one with a learning rate that makes alerts, and their comparison."""
    root = tmp_path_factory.mktemp("runs")
    few = yaml.safe_load((REPO / "configs" / "sd_lora_demo.yaml").read_text())
    few["trainer"] |= yaml.safe_load(CALLBACKS)["trainer"]
    few["model"]["init_args"] |= {
        "max_train_steps": 8, "num_inference_steps": 2, "num_validation_images": 2, "validation_steps": 4,
        "validation_prompts": ["a zorp mug"], "checkpointing_steps": 4,
    }  # fmt: skip
    few["data"]["init_args"] |= {"class_data_dir": None, "train_batch_size": 4, "cache_dir": str(root / "cache")}
    (root / "few.yaml").write_text(yaml.safe_dump(few))
    for name, rate in (("usual", 1e-3), ("high", 1.0)):
        arguments = ("--trainer.default_root_dir", root / name, "--model.init_args.learning_rate", rate)
        lightning("fit", "-c", root / "few.yaml", *arguments)
    lightning("report", root / "usual", root / "high", "-o", root / "comparison.html", "--picture", root / "curves.png")
    assert (root / "curves.png").stat().st_size > 10_000
    names = {name: root / name / f"{page}.html" for name, page in (("usual", "report"), ("high", "health"))}
    return {"report": names["usual"], "health": names["high"], "comparison": root / "comparison.html"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as opened:
        yield opened


@pytest.fixture(scope="module", params=["report", "health", "comparison"])
def opened(request: pytest.FixtureRequest, pages: dict[str, Path], browser: Chromium) -> dict[tuple[int, str], Opened]:
    page = pages[request.param]
    return {(width, scheme): browser.open(page, width, scheme=scheme) for width in WIDTHS for scheme in SCHEMES}


def test_nothing_goes_wrong_and_nothing_is_asked_for(opened: dict[tuple[int, str], Opened]) -> None:
    assert {case: (seen.errors, seen.requests) for case, seen in opened.items()} == dict.fromkeys(opened, ([], []))


def test_every_chart_is_drawn(opened: dict[tuple[int, str], Opened]) -> None:
    for seen in opened.values():
        assert seen.drawn and set(seen.drawn) == {"yes"}
        assert min(seen.marks) > 5


def test_no_page_is_wider_than_its_window(opened: dict[tuple[int, str], Opened]) -> None:
    assert {case: seen.scroll_px for case, seen in opened.items()} == dict.fromkeys(opened, 0)


def test_no_column_is_cut_and_no_word_is_broken(opened: dict[tuple[int, str], Opened]) -> None:
    assert {case: seen.cut for case, seen in opened.items()} == {case: [] for case in opened}


def test_pages_follow_light_and_dark(opened: dict[tuple[int, str], Opened]) -> None:
    for width in WIDTHS:
        assert opened[width, "light"].background != opened[width, "dark"].background
        assert opened[width, "light"].screenshot != opened[width, "dark"].screenshot


def test_the_verdict_is_the_first_thing_that_one_reads(pages: dict[str, Path], browser: Chromium) -> None:
    lines = browser.open(pages["report"]).text.splitlines()
    assert lines[0] == "usual" and "clip-t" in "".join(lines[1:4]).lower().replace("_", "-")


def test_charts_follow_a_window_that_is_turned(pages: dict[str, Path], browser: Chromium) -> None:
    """A phone that is turned makes the chart narrower than it was drawn."""
    narrowed = "document.querySelector('main').style.maxWidth='360px'"
    seen = browser.open(pages["report"], 1280, script=narrowed)
    assert seen.chart_width < 360


def test_a_page_that_renews_itself_shows_the_newer_one_where_it_was_scrolled_to(
    pages: dict[str, Path], browser: Chromium, tmp_path: Path
) -> None:
    record, page = read_run(pages["report"].parent), tmp_path / "report.html"
    page.write_text(render_run_page(record, renewed_every_s=1.5))

    def renew() -> None:
        record.name = "a newer page"
        page.write_text(render_run_page(record, renewed_every_s=1.5))
        time.sleep(4)

    seen = browser.open(page, script="scrollTo(0, 700)", before_looking=renew)
    assert seen.text.splitlines()[0] == "a newer page" and seen.scrolled_px == 700
    still = browser.open(page, script="document.querySelector('details').open=true", before_looking=renew)
    assert still.unfolded == 1 and still.errors == []


def test_a_broken_chart_and_a_request_are_seen(tmp_path: Path, browser: Chromium) -> None:
    """The tests above can fail."""
    (tmp_path / "bad.html").write_text(
        '<body><div class="chart" data-drawn="no"></div><div style="width:3000px">wide</div>'
        '<div class="wide" style="width:90px;overflow-x:auto"><table><tr><td style="white-space:nowrap">a cell too wide'
        '</table></div><h1 style="width:50px;overflow-wrap:anywhere">unbelievable</h1>'
        '<img src="http://example.org/a.png"><script>console.error("wrong"); missing()</script>'
    )
    seen = browser.open(tmp_path / "bad.html", 390)
    assert seen.cut[0].startswith("scrolls: a cell too wide") and seen.cut[1:] == ["broken: unbelievable"]
    assert seen.drawn == ["no"] and seen.scroll_px > 0 and seen.requests == ["http://example.org/a.png"]
    assert any("wrong" in error for error in seen.errors) and any("missing" in error for error in seen.errors)
