"""The names in a snapshot folder, and how folders in it come and go.

    step-00000500                complete
    step-00000500.again          complete too, and newer: a resumed run was killed as it replaced the other
    .step-00000500.1f3a90c2.0    unfinished: the run that writes it and how often it saved this step before
    .gone.step-00000400          on its way out
    .agree.1f3a90c2              votes of that run's ranks after an error: see `agreement`
    .lock                        see `lock`

Whatever has another name is not ours and is left alone, and so are links.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Container, Iterator
from itertools import chain
from pathlib import Path

from lightning_aigc.checkpoint.files import sync_folder

MANIFEST = "manifest.json"
AGAIN = ".again"
_COMPLETE = re.compile(r"step-(\d{8,})(\.again)?")
_LEFT_OVER = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}\.\d+|\.gone\.step-\d{8,}(\.again)?|\.agree\.[0-9a-f]{8}")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def unfinished_name(step: int, run: str, attempt: int) -> str:
    return f".{name_of(step)}.{run}.{attempt}"


def file_names(world_size: int) -> Iterator[str]:
    """All that a snapshot has besides its manifest."""
    for stem in chain(["shared"], (f"rank{rank}" for rank in range(world_size))):
        yield from (f"{stem}.safetensors", f"{stem}.json")


def complete_folders(directory: Path) -> list[tuple[int, Path]]:
    """Steps and folders by name alone, the newest first; links to folders included."""
    found = []
    for entry in _entries(directory):
        match = _COMPLETE.fullmatch(entry.name)
        if match and entry.is_dir():
            found.append((int(match[1]), bool(match[2]), Path(entry.path)))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def tidy(directory: Path, *, besides: Path | None = None) -> None:
    """Remove what a killed run or a failed attempt left unfinished, and end what it was doing just then."""
    for entry in _entries(directory):
        is_left_over = _LEFT_OVER.fullmatch(entry.name) and (besides is None or entry.name != besides.name)
        if is_left_over and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)  # what it cannot remove is in nobody's way
    for step, path in complete_folders(directory):
        if path.name.endswith(AGAIN):
            _take_place(path, directory / name_of(step))


def publish(unfinished: Path, step: int) -> Path:
    """Give a folder whose files are durable its name; one with this name stays loadable until then, and goes after."""
    directory = unfinished.parent
    final = directory / name_of(step)
    if not os.path.lexists(final):
        unfinished.rename(final)
    else:
        again = directory / f"{final.name}{AGAIN}"
        unfinished.rename(again)
        sync_folder(directory)
        _take_place(again, final)
    sync_folder(directory)
    return final


def rotate(directory: Path, step: int, keep_last: int, protected: Container[int]) -> None:
    """Remove the oldest snapshots beyond `keep_last`, counted back from `step`.

    Those of later steps are neither counted nor removed: the run went back to before them.
    """
    ours = [
        (old, path)
        for old, path in complete_folders(directory)
        if old <= step and not path.is_symlink() and (path / MANIFEST).exists()
    ]
    for old, path in ours[keep_last:]:
        if old not in protected:
            remove(path)


def remove(folder: Path) -> None:
    """Remove a folder so that no half of it is ever taken for a snapshot."""
    gone = folder.with_name(f".gone.{folder.name}")
    folder.rename(gone)
    shutil.rmtree(gone)


def _take_place(again: Path, final: Path) -> None:
    if final.is_symlink():
        final.unlink()
    elif final.exists():
        remove(final)
    again.rename(final)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        yield from sorted(entries, key=lambda entry: entry.name)
