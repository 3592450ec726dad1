"""validate, test and predict of the command line: they use the run's newest snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_aigc._lightning import LightningDataModule, LightningModule, Trainer, rank_zero_warn
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.checkpoint.files.reader import Snapshot, newest_complete
from lightning_aigc.checkpoint.lightning_loops import load_for_evaluation
from lightning_aigc.checkpoint.resume import LATEST, is_snapshot
from lightning_aigc.checkpoint.run_config import training_config
from lightning_aigc.checkpoint.whole_state import whole_checkpoint
from lightning_aigc.errors import ConfigError

UNTRAINED = "none"
EVALUATION_VERBS = ("validate", "test", "predict")
DATA = "data.init_args."
SPLIT = f"{DATA}validation_split"
HELD_OUT_FOLDERS = {
    "validation_data_dir": ("train_data_dir", "class_data_dir"),
    "validation_shards_dir": ("shards_dir",),
}
"""Arguments of held-out data, and those of the folders that a run trains on."""


def load_weights(
    trainer: Trainer,
    ckpt_path: str | None,
    module: LightningModule,
    data: LightningDataModule | None,
    verb: str,
) -> str | None:
    """Have the Trainer load the weights of `ckpt_path`: a snapshot's folder, latest, none, or Lightning's own kinds.

    Unset means the newest complete snapshot in the run's folder, or the untrained model if there is none; which of
    them is printed. `validate` and `test` warn of data that the snapshot's run may have trained on.
    Returns: the ckpt_path to give to the Trainer.
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
    if verb != "predict":
        for line in trained_images(snapshot.facts.get("config") or {}, training_config(trainer, module, data)):
            rank_zero_warn(line)
    load_for_evaluation(trainer, whole_checkpoint(snapshot))
    return str(snapshot.path)


def trained_images(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Warnings where held-out images of a configuration may be among those that a snapshot's run trained on.

    The split goes by each image's content, so an equal or smaller share, of any folder, holds no trained image.

    >>> trained_images({SPLIT: 0.2}, {SPLIT: 0.1}), trained_images({}, {SPLIT: 0.1})
    ([], [])
    """
    found = []
    is_known = SPLIT in was and SPLIT in now
    is_other_kind = _sources(was) != _sources(now)  # pairs of an edit are split by their sources
    if is_known and now[SPLIT] and (now[SPLIT] > was[SPLIT] or is_other_kind):
        is_same = all(was.get(key) == now.get(key) for key in (DATA + "train_data_dir", DATA + "dataset_name"))
        remedy = f"set {DATA}validation_data_dir to a folder of other images instead"
        if was[SPLIT] and not is_other_kind:
            remedy = f"set {SPLIT}: {was[SPLIT]}, or {remedy}"
        found.append(
            f"the run of this snapshot had {SPLIT}: {was[SPLIT]}, not {now[SPLIT]}: images that are held out now"
            f" {'were' if is_same else 'may have been'} trained on, so the loss is not that of new images; {remedy}"
        )
    for held, trained in HELD_OUT_FOLDERS.items():
        folder = now.get(DATA + held)
        for key in trained:
            if folder is not None and _overlap(folder, was.get(DATA + key)):
                found.append(
                    f"{DATA}{held} is {folder}, and the run of this snapshot trained on {was[DATA + key]}: the loss is"
                    f" not that of new images; set {DATA}{held} to a folder of other images"
                )
    return found


def _sources(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key.startswith(f"{DATA}source_data_dir")}


def _overlap(held: Any, trained: Any) -> bool:
    """Whether the held-out folder is, or lies in, one that was trained on."""
    if not (isinstance(held, str) and isinstance(trained, str)):
        return False
    return Path(held).expanduser().resolve().is_relative_to(Path(trained).expanduser().resolve())


def snapshot_folder(trainer: Trainer) -> Path:
    """Folder of the run's snapshots."""
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    directories = [c.directory for c in found if isinstance(c, ExactSnapshot) and c.directory]
    return Path(directories[0] if directories else Path(trainer.default_root_dir) / "snapshots")


def _say(trainer: Trainer, line: str) -> None:
    if trainer.is_global_zero:
        print(line, flush=True)
