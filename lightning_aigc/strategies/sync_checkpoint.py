"""SyncCheckpoint: each rank's sync state in a file next to the checkpoint, `last.ckpt.sync/rank0.ckpt` and so on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lightning_aigc.gradient_sync.base import Sync


class SyncCheckpoint:
    """Writes a rank's sync state, and keeps a loaded state until there is a sync."""

    KEY = "npu_sparse"

    def __init__(self) -> None:
        self.is_loaded = False
        """Whether the sync has the state of an earlier one."""
        self._expected = False
        self._states: list[dict[str, Any]] = []
        self._read: Callable[[Iterable[int]], list[dict[str, Any]]] = _nothing  # no lambda: spawn pickles a strategy
        self._saved_ranks = 0
        self._error = ""
        self._written: dict[str, Any] = {}
        """Step of each file that a rank was asked to write, until the file is removed."""

    def save(self, checkpoint_io: Any, sync: Sync, checkpoint: dict[str, Any], filepath: Any) -> dict[str, Any]:
        """Write this rank's file.

        Returns: the checkpoint with how many ranks wrote theirs, and at which step.
        """
        written = {"world_size": sync.groups.world_size, "global_step": checkpoint.get("global_step")}
        state = sync.state_dict() | {"global_step": written["global_step"]}
        if sync.has_rank_local_parameters:  # the ranks' optimizers differ, and the checkpoint has rank zero's alone
            state["optimizer_states"] = checkpoint.get("optimizer_states")
        for rank in range(sync.groups.world_size):
            self._written[_path(filepath, rank)] = written["global_step"] or 0
        checkpoint_io.save_checkpoint(state, _path(filepath, sync.groups.rank))
        return {**checkpoint, self.KEY: written}

    def load(
        self,
        checkpoint_io: Any,
        checkpoint: dict[str, Any],
        filepath: Any,
        rank: int,
        ranks: int,
        *,
        own_optimizers: bool,
    ) -> dict[str, Any]:
        """Read this rank's state, or those of all ranks when their number has changed.

        Returns: the checkpoint; where `own_optimizers`, with this rank's optimizer states, if it wrote them.
        """
        self._expected, self._states, self._error = False, [], ""
        written = checkpoint.get(self.KEY)
        if written is None:
            return checkpoint
        self._expected, self._saved_ranks = True, int(written["world_size"])

        def read(of_ranks: Iterable[int]) -> list[dict[str, Any]]:
            try:
                states = [checkpoint_io.load_checkpoint(_path(filepath, k), weights_only=True) for k in of_ranks]
                if any(state["global_step"] != written["global_step"] for state in states):
                    raise OSError("its files are of another step than the checkpoint")
            except OSError as error:
                self._error = f"{_folder(filepath)} has no complete sync state: {error}"
                return []
            return states

        self._read = read
        self._states = read([rank] if self._saved_ranks == ranks else range(self._saved_ranks))
        own = self._states[0].get("optimizer_states") if own_optimizers and len(self._states) == 1 else None
        return checkpoint if own is None else {**checkpoint, "optimizer_states": own}

    def expect(self, state_of: Callable[[int], dict[str, Any] | None], rank: int, ranks: int, saved_ranks: int) -> None:
        """Use a snapshot's states instead of a checkpoint's; `state_of` returns None if that run had no sync."""

        def read(of_ranks: Iterable[int]) -> list[dict[str, Any]]:
            return [state for state in map(state_of, of_ranks) if state is not None]

        self._read, self._saved_ranks, self._error = read, saved_ranks, ""
        self._states = read([rank] if saved_ranks == ranks else range(saved_ranks))
        self._expected = bool(self._states)

    def apply(self, sync: Sync | None, agree: Callable[[bool], bool]) -> list[str]:
        """Load the kept states into the sync. Collective if there is a sync.

        Args: agree: returns whether all ranks say yes.
        Returns: sentences on what cannot be exact.
        """
        states, expected, self._states, self._expected = self._states, self._expected, [], False
        self.is_loaded = False
        if not expected:
            return []
        if sync is None:
            return ["the checkpoint's run compressed gradients and this one does not; the residuals are dropped"]
        if self._saved_ranks == sync.groups.world_size and states:
            if sync.needs_all_states(states[0]):
                states = self._read(range(self._saved_ranks))
            else:
                states = states * self._saved_ranks
        if not agree(bool(states)):  # a rank with another history would select and send other values
            return [
                f"{self._error or 'another rank misses its sync state'}; the residuals of {self._saved_ranks} ranks "
                "are lost, and compression starts anew"
            ]
        self.is_loaded = True
        return sync.load_state_dict(states)

    def remove(self, checkpoint_io: Any, filepath: Any) -> None:
        """Remove a checkpoint and its files.

        An IO that writes in the background removes them when all ranks' files of the remaining checkpoints are durable;
        rank 0 knows only its own files.
        """
        folder = _folder(filepath)
        self._written = {path: step for path, step in self._written.items() if not path.startswith(f"{folder}/")}
        remove_once = getattr(checkpoint_io, "remove_once", None)
        for path in (filepath, folder):
            if remove_once is None:
                checkpoint_io.remove_checkpoint(path)
            else:
                remove_once(path, functools.partial(_are_written, dict(self._written)))


def _are_written(steps: dict[str, Any]) -> bool:
    on_disk = {path: _step_in(path) for path in steps}  # a newer file counts as well
    return all(on_disk[path] is not None and on_disk[path] >= step for path, step in steps.items())


def _step_in(path: str) -> Any:
    """Return the step of a rank's file, None where there is no file yet. Its tensors are not read."""
    try:
        return torch.load(path, weights_only=True, mmap=True)["global_step"]
    except (OSError, RuntimeError, KeyError):
        return None


def _nothing(ranks: Iterable[int]) -> list[dict[str, Any]]:
    return []


def _folder(filepath: Any) -> str:
    """Return the folder of a checkpoint's sync state; `filepath` may be a URL instead of a Path."""
    link = None if "://" in str(filepath) else Path(filepath)
    return f"{link.resolve() if link is not None and link.is_symlink() else filepath}.sync"  # save_last="link"


def _path(filepath: Any, rank: int) -> str:
    return f"{_folder(filepath)}/rank{rank}.ckpt"
