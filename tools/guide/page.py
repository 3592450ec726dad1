"""Write the printed lines and figures of the runs into docs/guide.md, from their rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.guide.pitfalls import Pitfall

PAGE = Path(__file__).parents[2] / "docs" / "guide.md"


def fill(page: str, pitfalls: Sequence[Pitfall], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with each pitfall's detecting line and figures from its row. Raises: ValueError."""
    for pitfall in pitfalls:
        start = page.index(f"## {pitfall.title}\n")
        end = page.find("\n## ", start)
        end = len(page) if end < 0 else end
        page = page[:start] + _fill_section(page[start:end], pitfall, rows[pitfall.name]) + page[end:]
    return page


def _fill_section(section: str, pitfall: Pitfall, row: Mapping[str, Any]) -> str:
    section = _replaced(section, rf"(Detected by `?{re.escape(pitfall.part)}`?:\n\n```\n).*?(\n```)", row["detected"])
    if row.get("bad") and row.get("cured"):
        section = _replaced(section, r"(\n\| bad \| ).*?( \|\n)", row["bad"])
        section = _replaced(section, r"(\n\| cured \| ).*?( \|\n|\ \|$)", row["cured"])
    return section


def _replaced(section: str, pattern: str, text: str) -> str:
    section, count = re.subn(pattern, lambda found: found[1] + text + found[2], section, flags=re.S)
    if count != 1:
        raise ValueError(f"{section.splitlines()[0]!r} has {count} places like {pattern!r}; wanted one")
    return section
