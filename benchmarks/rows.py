"""The rows of a benchmark: JSON, one a line, printed and kept in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def keep_row(row: Mapping[str, Any], output: Path | None) -> None:
    """Print a row, and append it to the file if there is one."""
    line = json.dumps(row)
    print(line, flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(line + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []
