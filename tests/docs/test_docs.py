"""The figures of the docs show the rows as they are, and every page and image is reached from another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import figures

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_shows_the_rows_as_they_are(name: str, tmp_path: Path) -> None:
    assert figures.is_current(name), "run `python -m tools.figures`"
    assert figures.draw(name, tmp_path).stat().st_size > 10_000


def test_a_figure_of_other_rows_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures.draw("two_hosts", tmp_path)
    assert figures.is_current("two_hosts", tmp_path)
    title, find_rows, draw = figures.FIGURES["two_hosts"]
    monkeypatch.setitem(figures.FIGURES, "two_hosts", (title, lambda: find_rows()[1:], draw))
    assert not figures.is_current("two_hosts", tmp_path)


def linked(page: Path) -> set[Path]:
    targets = (link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link)
    return {(page.parent / target).resolve() for target in targets}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    assert [str(target) for target in linked(page) if not target.exists()] == []


def test_every_page_and_picture_is_linked() -> None:
    reached = set().union(*(linked(page) for page in PAGES))
    files = {path.resolve() for path in DOCS.rglob("*") if path.suffix in (".md", ".png")}
    assert sorted(str(path) for path in files - reached if path.name != "index.md") == []
