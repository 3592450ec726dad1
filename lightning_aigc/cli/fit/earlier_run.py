"""Refuse a training in the folder of an earlier one, whose LoRA and page it would replace."""

from __future__ import annotations

from pathlib import Path

from lightning_aigc._lightning import Trainer
from lightning_aigc.callbacks.run_report.run_report import REPORT_FILE
from lightning_aigc.checkpoint.files.reader import find_snapshots
from lightning_aigc.cli.fit.evaluate import snapshot_folder
from lightning_aigc.errors import ConfigError
from lightning_aigc.report.record import SUMMARY_FILE

LISTED = 3


def refuse_earlier_run(trainer: Trainer) -> None:
    """Raise ConfigError, with what to type instead, where the run's folder has results or snapshots."""
    root = Path(trainer.default_root_dir)
    pages = [REPORT_FILE] if (root / SUMMARY_FILE).is_file() else []  # an unfinished run has a page too
    found = [*pages, *sorted(path.name for path in root.glob("*.safetensors"))]
    newest = next(iter(find_snapshots(snapshot_folder(trainer))), None)
    if not found and newest is None:
        return
    if found:
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        what = f"the results of an earlier run, {', '.join(found[:LISTED])}{more}"
    else:
        assert newest is not None
        what = f"an unfinished run, at step {newest.step}"
    raise ConfigError(
        f"{root} has {what}; add --resume to continue that run, --overwrite to replace it, or"
        f" --trainer.default_root_dir {next_folder(root)} to keep both"
    )


def next_folder(root: Path) -> Path:
    """A folder next to `root` that does not exist: `runs/my_2`, then `runs/my_3`."""
    number = 2
    while (found := root.with_name(f"{root.name}_{number}")).exists():
        number += 1
    return found
