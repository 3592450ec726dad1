"""Every notebook runs from top to bottom, and is kept without its outputs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "notebooks"))

from render import PAGES, run, write_page  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the kernel's own machinery; the notebook runs in another process
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_becomes_a_page_with_its_pictures(path: Path, tmp_path: Path) -> None:
    page = write_page(run(path, tmp_path), path.stem, tmp_path / "pages")
    pictures = re.findall(r"!\[png\]\((\S+\.png)\)", page.read_text())
    assert len(pictures) >= 3
    assert all((page.parent / picture).stat().st_size > 1000 for picture in pictures)
    assert str(tmp_path) not in page.read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_in_docs_is_of_this_notebook(path: Path) -> None:
    page = (PAGES / f"{path.stem}.md").read_text(encoding="utf-8")
    missing = [
        cell.source for cell in nbformat.read(path, as_version=4).cells if squeezed(cell.source) not in squeezed(page)
    ]
    assert missing == [], "run `python notebooks/render.py`"


def squeezed(text: str) -> str:
    """Without blank lines and ends of lines, which the page drops."""
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
