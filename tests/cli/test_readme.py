"""README.md: its commands for a folder of images, and the error below them, are what the command line does."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n(.*?)```", README, re.DOTALL)


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)[1:]


@pytest.mark.filterwarnings("ignore")
def test_the_mistake_that_is_shown_gives_the_error_that_is_shown(
    command: Command, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, tmp_path / "photos")
    (init,) = (line for block in BLOCKS for line in block.splitlines() if line.startswith("lightning init"))
    assert command(*words(init)).code == 0
    (mistake,) = (block for block in BLOCKS if "\nerror: " in block)
    typed, shown = mistake.strip().splitlines()
    said = command(*words(typed))
    assert said.code != 0 and said.err.strip() == shown
