"""Resuming: which snapshot a fit starts from, how it is loaded into the Trainer, and the command that resumes a run."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_aigc._lightning import SLURMEnvironment, TorchElasticEnvironment, Trainer, rank_zero_info, rank_zero_warn
from lightning_aigc.checkpoint import lightning_loops, training_state
from lightning_aigc.checkpoint.dataloader import stateful
from lightning_aigc.checkpoint.files.reader import Snapshot, find_snapshots, newest_complete
from lightning_aigc.checkpoint.files.storage import MANIFEST, complete_folders, name_of
from lightning_aigc.checkpoint.lightning_loops import LoopState
from lightning_aigc.checkpoint.preemption import is_requeued
from lightning_aigc.checkpoint.run_config import device_name, differences, limits_of, training_config
from lightning_aigc.checkpoint.whole_state import whole_state
from lightning_aigc.errors import ConfigError
from lightning_aigc.protocols import HasShardedTensors, HasSnapshotState

LATEST = "latest"


def choose_snapshot(trainer: Trainer, directory: Path, path: Any) -> Snapshot | None:
    """The snapshot that a ckpt_path names, or the newest complete one if it asks for `latest`; the same on every rank.

    Returns: None if it asks for neither, or if there is none, which is logged.
    Raises: SnapshotError if the named one is damaged.
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


class ResumeSession:
    """Loads one snapshot into a Trainer, from its files to the first batch; call the methods in their order here.

    Args: is_named: the user named the snapshot, so that a different configuration is a warning and not an error.
    """

    def __init__(self, trainer: Trainer, snapshot: Snapshot, *, is_named: bool) -> None:
        self.snapshot = snapshot
        self._trainer, self._must_match = trainer, not is_named
        rank, world_size = trainer.global_rank, trainer.world_size
        for note in resume_caveats(snapshot, world_size, device_name(trainer)):
            rank_zero_warn(f"not bit for bit the run of the snapshot: {note}")
        is_same = snapshot.world_size == world_size
        own = snapshot.rank(rank) if is_same else reshard(snapshot, rank, world_size)
        saved, now = strategy_kind(own), training_state.strategy_kind(trainer)
        if saved != now:
            rank_zero_warn(strategy_caveat(saved, now, drops=has_residuals(own)))
        if not is_same or saved != now:
            own["checkpoint"], own["gradients"] = whole_state(snapshot, own)
        else:
            own["checkpoint"] = snapshot.shared() | own["checkpoint"]
            if isinstance(trainer.strategy, HasShardedTensors):
                for key in ("checkpoint", "gradients"):
                    own[key] = trainer.strategy.from_shards(own[key])
        self._own = own

    def load(self) -> None:
        """Hand Lightning its checkpoint, and the strategy its state."""
        trainer, snapshot, own = self._trainer, self.snapshot, self._own
        lightning_loops.load_checkpoint(
            trainer, dict(own["checkpoint"]), own["loop_state"]["loops"], str(snapshot.path)
        )
        strategy = trainer.strategy
        if own["strategy"] is not None and isinstance(strategy, HasSnapshotState):
            strategy.load_snapshot_state(lambda k: snapshot.rank(k)["strategy"], snapshot.world_size)
        self.compare_config("before")
        rank_zero_info(f"resuming from {snapshot.path}: step {snapshot.step}")

    def compare_config(self, when: Literal["before", "after"]) -> None:
        """Compare the configuration: first without the optimizers, which Lightning makes last, then those alone.

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
                f"{text}\nset them as they were, or, to resume with them anyway, name the snapshot:"
                f" {resume_command(snapshot=self.snapshot.path)}"
            )
        rank_zero_warn(text)

    def load_loaders(self, loaders: list[Any]) -> None:
        """Give the training loaders their states."""
        # Lightning assumes that a loader without state_dict starts over; resume_caveat has said what may differ.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        loop_state = self._own["loop_state"]
        for loader, saved in zip(loaders, loop_state["loaders"], strict=True):
            if isinstance(loader, stateful.ResumableLoader):
                state = (
                    loader.state_after(loop_state["cycle"]["index"]) if saved is None else stateful.from_plain(saved)
                )
                loader.load_snapshot_state(state)

    def is_of_this_run(self, directory: Path) -> bool:
        """Whether the snapshot lies in this run's folder and was written by as many ranks."""
        is_here = self.snapshot.path == directory / name_of(self.snapshot.step)
        return is_here and self.snapshot.world_size == self._trainer.world_size

    def finish(self, local_state: training_state.LocalState) -> LoopState:
        """Restore the rest; the next batch is the one that the killed run did not finish. Returns: the loops' state."""
        trainer = self._trainer
        training_state.restore(trainer, self._own, local_state)
        loop_state = LoopState.from_plain(self._own["loop_state"], trainer.strategy.root_device)
        # An early stop remains in force, unless the user has changed the limits since.
        if loop_state.should_stop and self.snapshot.facts.get("limits") == limits_of(trainer, trainer.lightning_module):
            trainer.should_stop = True
        return loop_state


def strategy_kind(own: dict[str, Any]) -> str | None:
    """Kind of split over the ranks by the strategy that wrote a state; None if each rank has all of it."""
    return None if own["strategy"] is None else str(own["strategy"]["kind"])


def has_residuals(own: dict[str, Any]) -> bool:
    """Whether a rank's state holds what gradient compression has not sent yet."""
    return bool(((own["strategy"] or {}).get("sync") or {}).get("residuals"))


def strategy_caveat(saved: str | None, now: str | None, *, drops: bool) -> str:
    return (
        f"the snapshot's strategy is {saved or 'one device or DDP'} and this run's is {now or 'one device or DDP'}: "
        "weights, optimizer states and schedules go on"
        + "; what gradient compression had not sent yet is dropped"
        * drops
    )


def is_snapshot(path: Any) -> bool:
    """Whether an address is the folder of one snapshot rather than a checkpoint of Lightning."""
    return bool(path) and "://" not in str(path) and (Path(path) / MANIFEST).is_file()


def resume_command(arguments: list[str] | None = None, snapshot: Path | None = None) -> str:
    """The command that resumes the run of these arguments, `sys.argv` by default.

    Where torchrun or srun starts the ranks, only they know the whole command, so it is described.

    Args: snapshot: one to name; the command then takes another configuration too.
    """
    program, *words = sys.argv if arguments is None else arguments
    if "fit" not in words:
        return f"trainer.fit(..., ckpt_path={json.dumps(str(snapshot or LATEST))})"
    ending = "--resume" if snapshot is None else f"--ckpt_path {shlex.quote(str(snapshot))}"
    if any(kind.detect() and kind().world_size() > 1 for kind in (TorchElasticEnvironment, SLURMEnvironment)):
        return f"the same command on every node, with {ending}"
    kept, skip = [], False
    for word in words:
        if not skip and word.split("=")[0] not in ("--ckpt_path", "--resume", "--overwrite"):
            kept.append(word)
        skip = word == "--ckpt_path"
    start = "python -m lightning_aigc" if Path(program).name == "__main__.py" else "lightning"
    return f"{start} {shlex.join(kept)} {ending}"


def go_back(directory: Path | None) -> str:
    """A clause for a run that has gone wrong: the command that trains on from its newest snapshot, if there is one."""
    newest = None if directory is None else next(iter(find_snapshots(directory)), None)
    if newest is None:
        return "train anew, since there is no snapshot to go back to"
    return f"go back to the snapshot of step {newest.step}: {resume_command(snapshot=newest.path)}"


def set_aside(directory: Path, after_step: int) -> None:
    """Move an earlier run's snapshots of later steps than this run's start into a folder of their own, and log it."""
    beyond = [path for step, path in complete_folders(directory) if step > after_step]
    if not beyond:
        return
    aside = move_aside(beyond, directory)
    newest = aside / max(path.name for path in beyond)
    rank_zero_info(
        f"snapshots of an earlier run beyond this one's start are in {aside} now; delete them when you no longer need"
        f" them, or stop and resume from them: {resume_command(snapshot=newest)}"
    )


def move_aside(paths: Sequence[Path], directory: Path) -> Path:
    """Move files or folders of a directory into its first free `earlier-1`, `earlier-2`, ..., and return that."""
    number = 1
    while (aside := directory / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for path in paths:
        target = aside / path.relative_to(directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return aside


def last_sentence(directory: Path) -> str:
    """Return the last snapshot and the command that resumes from it, in words."""
    last = next(iter(find_snapshots(directory)), None)
    if last is None:
        return "there is no snapshot to resume from"
    return f"the last snapshot is of step {last.step}; resume from it with: {resume_command()}"


def resume_caveats(snapshot: Snapshot, world_size: int, device: str) -> list[str]:
    """Sentences on what cannot be bitwise equal on this hardware."""
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


def reshard(snapshot: Snapshot, rank: int, world_size: int) -> dict[str, Any]:
    """This rank's state; its loaders' states are None, and the loops' counters say where the loaders begin."""
    old = snapshot.world_size
    own: dict[str, Any] = snapshot.rank(rank % old)
    loop_state = own["loop_state"]
    loop_state["loaders"] = [None] * len(loop_state["loaders"])
    current = loop_state["loops"]["epoch_loop.batch_progress"]["current"]
    batches = _scaled(current["ready"], old / world_size, own["accumulate_grad_batches"])
    loop_state["cycle"]["index"] = batches
    metrics = loop_state["metrics"]
    for metric in metrics["epoch"]:  # sums of one rank: schedules get its mean so far instead
        name = metric["meta"]["name"] + ("_epoch" if metric["meta"]["on_step"] else "")
        value, batch_size = metric["value"], metric["batch_size"]
        metrics["callback"][name] = value if batch_size is None else value / batch_size
    metrics["epoch"] = []
    for name in current:
        current[name] = batches
    for state in loop_state["loops"]["state_dict"].get("combined_loader", ()):
        if "position" in state:  # a stateful loader that counts its batches, as ImageCaptionData does
            state["position"] = batches
    if rank >= old:
        loop_state["random"]["torch"] = (
            torch.Generator().manual_seed(_seed(loop_state["random"]["torch"], rank)).get_state()
        )
        loop_state["random"]["accelerator"] = None
    return own


def _scaled(batches: int, factor: float, window: int) -> int:
    """The same share of the epoch, at the same micro-batch of a window."""
    phase = batches % window
    return max(0, int(batches * factor) - phase) // window * window + phase


def _seed(state: Tensor, rank: int) -> int:
    return int(state.to(torch.int64).sum()) * 1000 + rank
