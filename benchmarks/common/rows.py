"""Rows of a benchmark: JSON, one per line, printed and appended to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any


def keep_row(row: Mapping[str, Any], output: Path | None) -> None:
    """Print a row with today's date, and append it to the file if there is one."""
    line = json.dumps({**row, "date": date.today().isoformat()})
    print(line, flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; empty if it does not exist yet."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.exists()
        else []
    )
