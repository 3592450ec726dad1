"""Where a fit begins: which snapshot it goes on from, and that snapshot's way into the Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint

from lightning_aigc.checkpoint import loader as loaders
from lightning_aigc.checkpoint import whole_state
from lightning_aigc.checkpoint.catalog import Snapshot, newest_complete
from lightning_aigc.checkpoint.config import differences, training_config
from lightning_aigc.checkpoint.ending import limits_of
from lightning_aigc.checkpoint.other_ranks import for_other_ranks
from lightning_aigc.checkpoint.resume import LATEST, is_snapshot, what_is_not_exact
from lightning_aigc.checkpoint.slurm import is_requeued
from lightning_aigc.checkpoint.trainer_state import Moment, OwnBuffers
from lightning_aigc.errors import ConfigError


def choose(trainer: Trainer, directory: Path, path: Any) -> Snapshot | None:
    """The snapshot that a ckpt_path names, or the newest whole one where it asks for that; on all ranks the same.

    Returns: None if it asks for neither, or if there is none, which is said.
    Raises: SnapshotError if the one that is named is not whole.
    """
    if is_snapshot(path):
        snapshot = Snapshot.at(Path(path))
        snapshot.verify()
        return snapshot
    if path != LATEST and not (path is None and is_requeued()):
        return None
    found = newest_complete(directory, rank_zero_warn) if trainer.is_global_zero else None
    chosen = trainer.strategy.broadcast(None if found is None else str(found.path))
    if chosen is None:
        rank_zero_info(f"nothing to resume in {directory}: the run starts at its beginning")
        return None
    return found or Snapshot.at(Path(chosen))


class Arrival:
    """One snapshot from its files to the first batch after it; the methods come in the order they are called in.

    Args: is_named: the user named it, so that another configuration is told and not refused.
    """

    def __init__(self, trainer: Trainer, snapshot: Snapshot, *, is_named: bool) -> None:
        self.snapshot = snapshot
        self._trainer, self._must_match = trainer, not is_named
        rank, world_size = trainer.global_rank, trainer.world_size
        for note in what_is_not_exact(snapshot, world_size, device_name(trainer)):
            rank_zero_warn(f"not bit for bit the run of the snapshot: {note}")
        is_same = snapshot.world_size == world_size
        self._own = snapshot.rank(rank) if is_same else for_other_ranks(snapshot, rank, world_size)

    def load(self) -> None:
        """Hand Lightning its checkpoint, in place of a file, and the strategy what it had."""
        trainer, snapshot, own = self._trainer, self.snapshot, self._own
        checkpoint = snapshot.shared() | own["checkpoint"]
        connector = trainer._checkpoint_connector
        loops: dict[str, Any] = connector._get_loops_state_dict()
        checkpoint["loops"] = loops | {"fit_loop": own["moment"]["loops"]}
        checkpoint = _pl_migrate_checkpoint(checkpoint, str(snapshot.path))
        connector._loaded_checkpoint, connector._ckpt_path = checkpoint, str(snapshot.path)
        strategy = trainer.strategy
        if own["strategy"] is not None and hasattr(strategy, "load_snapshot_state"):
            strategy.load_snapshot_state(lambda k: snapshot.rank(k)["strategy"], snapshot.world_size)
        self.compare_config("before")
        rank_zero_info(f"going on from {snapshot.path}: step {snapshot.step}")

    def compare_config(self, when: Literal["before", "after"]) -> None:
        """Before the model is loaded what stands in the config; after it the optimizers, which are made last.

        Raises: ConfigError with each key that differs, unless the user named the snapshot.
        """
        now = training_config(self._trainer, self._trainer.lightning_module)
        lines = [
            line
            for line in differences(self.snapshot.facts.get("config", {}), now)
            if line.startswith("optimizer") == (when == "after")
        ]
        if not lines:
            return
        text = "the snapshot is of a run with another configuration:\n  " + "\n  ".join(lines)
        if self._must_match:
            raise ConfigError(
                f"{text}\nset them as they were, or, to go on with them all the same, name the snapshot:"
                f" --ckpt_path {self.snapshot.path}"
            )
        rank_zero_warn(text)

    def place(self, ready: list[Any]) -> None:
        """Tell the training loaders where they are to begin."""
        # Lightning takes a loader without state_dict for one that starts anew; what may differ here was said already.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        moment = self._own["moment"]
        for one, place in zip(ready, moment["places"], strict=True):
            if isinstance(one, loaders.Resumable):
                is_known = place is not None
                one.go_to(loaders.from_plain(place) if is_known else one.place_after(moment["cycle"]["index"]))

    def finish(self, own_buffers: OwnBuffers) -> Moment:
        """All else is put back; the next batch is the one that the killed run did not finish. Returns: that place."""
        trainer = self._trainer
        whole_state.restore(trainer, self._own, own_buffers)
        moment = Moment.from_plain(self._own["moment"], trainer.strategy.root_device)
        # An early stop stays one, unless the user has moved the limits since.
        if moment.should_stop and self.snapshot.facts.get("limits") == limits_of(trainer, trainer.lightning_module):
            trainer.should_stop = True
        return moment


def device_name(trainer: Trainer) -> str:
    """What sums are rounded by."""
    device = trainer.strategy.root_device
    name: str = device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return name
