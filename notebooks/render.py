"""Run notebooks and write them with their outputs to docs/notebooks: `python notebooks/render.py [NOTEBOOK ...]`."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "notebooks"


def run(path: Path, folder: Path, timeout_s: int = 300) -> nbformat.NotebookNode:
    """Return the notebook with its outputs, run from top to bottom in `folder` by a kernel that imports this tree.

    Raises: nbclient.exceptions.CellExecutionError with the traceback of the cell that failed.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "kernels")),
        "IPYTHONDIR": str(folder),
    }
    client = NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    asyncio.run(client.async_execute(env=environment))
    return notebook


def write_page(notebook: nbformat.NotebookNode, name: str, pages: Path = PAGES) -> Path:
    """Write `<pages>/<name>.md` and its images."""
    pages.mkdir(parents=True, exist_ok=True)
    for cell in notebook.cells:  # progress bars and warnings
        cell.outputs = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
    for old in pages.glob(f"{name}_*.png"):
        old.unlink()
    text, extra = MarkdownExporter().from_notebook_node(notebook, {"unique_key": name})
    for image, data in extra["outputs"].items():
        (pages / image).write_bytes(data)
    # Folders of the run that made the page, and blank ends and runs of lines, say nothing to its readers.
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/\w+", "runs", text)
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))
    page = pages / f"{name}.md"
    page.write_text(text.strip() + "\n", encoding="utf-8")
    return page


if __name__ == "__main__":
    for source in map(Path, sys.argv[1:] or sorted(map(str, (ROOT / "notebooks").glob("*.ipynb")))):
        with tempfile.TemporaryDirectory() as temporary:
            print(write_page(run(source, Path(temporary)), source.stem))
