"""The end of a run: whether its steps are all taken, and whether the files that its end writes are there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from lightning_aigc.checkpoint.catalog import Snapshot, find_snapshots
from lightning_aigc.checkpoint.config import differences, training_config
from lightning_aigc.checkpoint.files import sync_folder
from lightning_aigc.errors import SnapshotError


def limits_of(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """What ends a run as plain JSON: steps, epochs and seconds; -1 and None are no limit."""
    steps = trainer.max_steps
    if steps == -1:
        steps = module.hparams.get("max_train_steps") or -1
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    seconds = [one._duration for one in found if isinstance(one, Timer)]
    return {"max_steps": steps, "max_epochs": trainer.max_epochs, "max_time": seconds}


def final_facts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """What the manifest of a finished run's last snapshot says: that it is finished, its limits and its final files.

    The files of callbacks that have `final_files(trainer, module)` are made durable first.
    """
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    files = [path for one in found if hasattr(one, "final_files") for path in one.final_files(trainer, module)]
    root = Path(trainer.default_root_dir)
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return {
        "is_finished": True,
        "limits": limits_of(trainer, module),
        "epochs": epochs.processed,
        "final_files": [_relative(path, root) for path in files if _made_durable(path)],
    }


def is_over(snapshot: Snapshot, trainer: Trainer, module: LightningModule) -> bool:
    """Whether nothing is left to do: the run had its end, its files are there, and no limit was raised since."""
    facts = snapshot.facts
    root = Path(trainer.default_root_dir)
    if not facts.get("is_finished") or not all((root / name).is_file() for name in facts.get("final_files", ())):
        return False
    limits = limits_of(trainer, module)
    if limits == facts.get("limits"):  # also where an early stop, or the time, was what ended it
        return True
    steps, epochs = limits["max_steps"], limits["max_epochs"]
    return bool(0 <= steps <= snapshot.step or (epochs is not None and 0 <= epochs <= facts.get("epochs", 0)))


def find_finished(trainer: Trainer, module: LightningModule, directory: Path) -> Snapshot | None:
    """The newest snapshot of a run with this configuration, if that run is over."""
    newest = next(iter(find_snapshots(directory)), None)
    if newest is None or not is_over(newest, trainer, module):
        return None
    if differences(newest.facts.get("config", {}), training_config(trainer, module)):
        return None
    try:
        newest.verify()
    except SnapshotError:
        return None
    return newest


def finished_sentence(snapshot: Snapshot, root: str | Path) -> str:
    return (
        f"the run in {root} is finished: {snapshot.step} steps, and its files are written; nothing to do"
        " (a larger max_steps or max_epochs goes on from its end)"
    )


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path.absolute())


def _made_durable(path: Path) -> bool:
    """Whether the file is there; then it outlives a power cut too."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        os.fsync(file)
    finally:
        os.close(file)
    sync_folder(path.parent)
    return True
