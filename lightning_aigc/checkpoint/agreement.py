"""Ranks agree by files whether to do something together: after an error, one of them may hang in a collective."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from lightning_aigc.checkpoint.lock import run_in

WAIT_S = 10.0
"""How long a rank waits for the others' votes; ranks that fail alike are milliseconds to seconds apart."""
NO = "no"
YES = "yes"


def all_agree(directory: Path, rank: int, world_size: int, vote: str | None, wait_s: float | None = None) -> bool:
    """Whether every rank has cast this same vote; once a run, and on all ranks that answer alike.

    Rank 0 decides, and a rank that gave up waiting takes its vote back. So ranks can differ in their answer only if one
    stalls just then for longer than the wait; whatever they then do together must have a bound of its own.

    Args:
        directory: the snapshot folder, which all ranks see and rank 0 has opened.
        vote: None stands against it.
    """
    wait_s = WAIT_S if wait_s is None else wait_s
    run = run_in(directory)
    if run is None:
        return False
    folder = directory / f".agree.{run}"
    own, decision = folder / f"rank{rank}", folder / "decision"
    folder.mkdir(exist_ok=True)
    _put(own, NO if vote is None else vote)
    end, is_extended = time.monotonic() + wait_s, False
    while True:
        votes = [_get(folder / f"rank{k}") for k in range(world_size)]
        said = _get(decision)
        if rank == 0:
            if None not in votes or NO in votes or time.monotonic() > end:
                is_agreed = vote is not None and all(one == vote for one in votes)
                _put(decision, YES if is_agreed else NO)
                return is_agreed
        elif said is not None or NO in votes:
            return said == YES
        elif None not in votes and not is_extended:
            end, is_extended = time.monotonic() + wait_s, True  # rank 0 is about to decide
        elif time.monotonic() > end:
            _put(own, NO)
            return _get(decision) == YES
        time.sleep(0.02)


def _put(path: Path, text: str) -> None:
    """Write a vote whole; nothing where rank 0 has closed the run and removed the votes, which nobody reads then."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        unfinished.write_text(text)
        unfinished.replace(path)


def _get(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
