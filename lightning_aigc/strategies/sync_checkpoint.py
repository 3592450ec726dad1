"""Each rank's sync state in a file of its own beside the checkpoint: `last.ckpt.sync/rank0.ckpt` and so on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from lightning_aigc.gradient_sync.factory import AnySync


class SyncCheckpoint:
    """Writes what a rank owes, and keeps what was read until there is a sync to take it up."""

    KEY = "npu_sparse"

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []
        self._notes: list[str] = []

    def of(self, sync: AnySync | None, optimizer_steps: int) -> dict[str, Any] | None:
        return None if sync is None else sync.state_dict() | {"optimizer_steps": optimizer_steps}

    def save(self, checkpoint_io: Any, state: dict[str, Any], filepath: Any, rank: int) -> None:
        checkpoint_io.save_checkpoint(state, _path(filepath, rank))

    def load(self, checkpoint_io: Any, checkpoint: Mapping[str, Any], filepath: Any, rank: int, ranks: int) -> None:
        """Read this rank's state, or all of them when their number has changed."""
        self._states, self._notes = [], []
        if self.KEY not in checkpoint:
            return
        saved_ranks = int(checkpoint[self.KEY]["world_size"])
        try:
            if saved_ranks == ranks:
                own = checkpoint_io.load_checkpoint(_path(filepath, rank), weights_only=True)
                self._states = [own] * ranks
            else:
                paths = (_path(filepath, k) for k in range(saved_ranks))
                self._states = [checkpoint_io.load_checkpoint(path, weights_only=True) for path in paths]
        except (FileNotFoundError, OSError) as error:
            self._notes = [
                f"{_folder(filepath)} has no whole sync state ({error}); what {saved_ranks} ranks still owed is lost, "
                "and compression starts anew"
            ]

    def apply(self, sync: AnySync | None) -> list[str]:
        """Hand what was read to the sync; sentences on what is not exact."""
        states, self._states = self._states, []
        notes, self._notes = self._notes, []
        if states and sync is not None:
            notes += sync.load_state_dict(states)
        elif states:
            notes.append("the checkpoint's run compressed gradients and this one does not; what ranks owed is dropped")
        return notes

    def remove(self, checkpoint_io: Any, filepath: Any) -> None:
        checkpoint_io.remove_checkpoint(_folder(filepath))


def _folder(filepath: Any) -> str:
    return f"{filepath}.sync"


def _path(filepath: Any, rank: int) -> str:
    return str(PurePath(_folder(filepath)) / f"rank{rank}.ckpt")
