"""validate, test and predict of the command line: they use the run's newest snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_aigc._lightning import Trainer, rank_zero_warn
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.checkpoint.files.reader import Snapshot, newest_complete
from lightning_aigc.checkpoint.lightning_loops import load_for_evaluation
from lightning_aigc.checkpoint.resume import LATEST, is_snapshot
from lightning_aigc.checkpoint.whole_state import whole_checkpoint
from lightning_aigc.errors import ConfigError

UNTRAINED = "none"
EVALUATION_VERBS = ("validate", "test", "predict")


def load_weights(trainer: Trainer, ckpt_path: str | None) -> str | None:
    """Have the Trainer load the weights of `ckpt_path`: a snapshot's folder, latest, none, or Lightning's own kinds.

    Unset means the newest complete snapshot in the run's folder, or the untrained model if there is none; which of
    them is printed. Returns: the ckpt_path to give to the Trainer.
    Raises: ConfigError for `latest` without a snapshot.
    """
    if ckpt_path == UNTRAINED:
        _say(trainer, "weights: the untrained model")
        return None
    if ckpt_path not in (None, LATEST) and not is_snapshot(ckpt_path):
        return ckpt_path
    directory = snapshot_folder(trainer)
    if is_snapshot(ckpt_path):
        snapshot: Snapshot | None = Snapshot.at(Path(str(ckpt_path)))
    else:
        snapshot = newest_complete(directory, rank_zero_warn)
    if snapshot is None:
        if ckpt_path == LATEST:
            raise ConfigError(
                f"ckpt_path: latest finds no snapshot in {directory}; train first, or give --ckpt_path {UNTRAINED} for"
                " the untrained model"
            )
        _say(trainer, f"weights: the untrained model, because {directory} has no snapshot")
        return None
    _say(trainer, f"weights: the snapshot of step {snapshot.step}, {snapshot.path}")
    load_for_evaluation(trainer, whole_checkpoint(snapshot))
    return str(snapshot.path)


def snapshot_folder(trainer: Trainer) -> Path:
    """Folder of the run's snapshots."""
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    directories = [c.directory for c in found if isinstance(c, ExactSnapshot) and c.directory]
    return Path(directories[0] if directories else Path(trainer.default_root_dir) / "snapshots")


def _say(trainer: Trainer, line: str) -> None:
    if trainer.is_global_zero:
        print(line, flush=True)
