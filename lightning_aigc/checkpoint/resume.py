"""Which snapshot a run goes on from, what is told about it, and how the user goes on after an interruption."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from lightning_aigc.checkpoint.catalog import Snapshot
from lightning_aigc.checkpoint.folders import MANIFEST, complete_folders

LATEST = "latest"


def is_snapshot(path: Any) -> bool:
    """Whether an address is the folder of one snapshot, and no file of Lightning's."""
    return bool(path) and "://" not in str(path) and (Path(path) / MANIFEST).is_file()


def how_to_go_on(arguments: list[str] | None = None) -> str:
    """The command that continues the run of these arguments, `sys.argv` by default."""
    program, *words = sys.argv if arguments is None else arguments
    if "fit" not in words:
        return f'trainer.fit(..., ckpt_path="{LATEST}")'
    kept, skip = [], False
    for word in words:
        if not skip and not word.startswith("--ckpt_path=") and word not in ("--ckpt_path", "--resume"):
            kept.append(word)
        skip = word == "--ckpt_path"
    start = "python -m lightning_aigc" if Path(program).name == "__main__.py" else "lightning"
    return f"{start} {shlex.join(kept)} --resume"


def set_aside(directory: Path, after_step: int) -> Path | None:
    """Move the snapshots of an earlier run that lie beyond this run's start out of the way of its own.

    Returns: the folder that has them now; None if there were none.
    """
    beyond = [path for step, path in complete_folders(directory) if step > after_step]
    if not beyond:
        return None
    number = 1
    while (aside := directory / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for path in beyond:
        path.rename(aside / path.name)
    return aside


def what_is_not_exact(snapshot: Snapshot, world_size: int, device: str) -> list[str]:
    """Sentences on what cannot go on bit for bit on this hardware."""
    notes = []
    if snapshot.world_size != world_size:
        notes.append(
            f"it was taken on {snapshot.world_size} rank(s) and this run has {world_size}: weights, optimizer, schedule"
            " and counters go on as they were; the split of the data and each rank's random draws do not"
        )
    was = snapshot.facts.get("device", device)
    if was != device:
        notes.append(f"it was taken on {was} and this run is on {device}: sums round differently there")
    return notes
