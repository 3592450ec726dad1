"""A run taken back to an earlier snapshot, as if it had been stopped there."""

from __future__ import annotations

import shutil
from pathlib import Path


def rewind(folder: Path, step: int) -> None:
    """Remove the snapshots of ExactSnapshot that were taken after this step.

    A snapshot changes nothing in a run: test_exact_snapshot.py compares a run with snapshots to one without.
    """
    snapshots = sorted((folder / "snapshots").glob("step-*"))
    steps = [int(snapshot.name.removeprefix("step-")) for snapshot in snapshots]
    assert step in steps and max(steps) > step, f"no snapshot to go back to among the steps {steps}"
    for snapshot, taken in zip(snapshots, steps, strict=True):
        if taken > step:
            shutil.rmtree(snapshot)
