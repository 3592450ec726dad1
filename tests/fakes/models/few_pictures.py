"""The first pictures of an embedded set, with their captions, for runs that would take long to encode all of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lightning_aigc.embedded import resolve


def few_of(name: str, count: int, folder: Path) -> Path:
    """Copy so many pictures of a set such as `embedded:brand`; returns the folder."""
    source = Path(resolve(name))
    lines = (source / "metadata.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    folder.mkdir()
    for line in lines:
        shutil.copy(source / json.loads(line)["file_name"], folder)
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
