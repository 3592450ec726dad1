"""Sync: the interface of every gradient sync, for the strategy and for GradientCompressor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.gradient_sync.hook import attach_hook
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups, SyncError
from lightning_aigc.gradient_sync.watch.step_report import StepReport


class Sync(ABC):
    """Keeps the ranks of one DistributedDataParallel model together, as DDP's communication hook."""

    has_rank_local_parameters = False
    """Whether the ranks' parameters and optimizers differ between two averages."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self.step = self.skipped_steps = 0
        """Steps of the run with finite gradients, those before this sync included, and its steps without."""
        self.report: StepReport | None = None
        self._is_closed = False

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Become the communication hook of this model."""
        attach_hook(ddp, self._on_open_bucket)

    @abstractmethod
    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket of gradients from DDP. Returns: the future of the tensor that DDP writes back."""

    @abstractmethod
    def end_step(self) -> StepReport | None:
        """End the sync of a backward pass. Returns: its report; None before the first one."""

    def after_optimizer_step(self) -> None:  # noqa: B027  most syncs have nothing to do
        """Hook after each optimizer step; every rank calls it."""

    def average_parameters(self) -> None:  # noqa: B027
        """Average the parameters now if they differ between ranks: after training, and before a checkpoint."""

    def end_training(self) -> None:
        """Average the parameters a last time; every rank calls it once, after its last step."""
        self.average_parameters()

    def take_notes(self) -> list[str]:
        """Return sentences for the user that came up since the last call."""
        return []

    def set_early_selection(self, enabled: bool) -> None:  # noqa: B027
        """Set whether a sparse mode may select blocks by the sum of the micro-batches so far."""

    def describe_wait(self) -> list[str]:
        """Return lines that say what this rank waits for, as seen from another thread."""
        return [f"step {self.step} of gradient sync", *self.groups.traffic.describe_recent()]

    def needs_all_states(self, state: dict[str, Any]) -> bool:
        """Whether `load_state_dict` needs the states of all ranks; this rank's own is enough otherwise."""
        return False

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as plain CPU tensors and numbers."""

    @abstractmethod
    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> list[str]:
        """Load the states of all ranks that saved. Returns: sentences on what cannot be exact."""

    def close(self) -> None:
        """Destroy the process groups. DDP keeps its hook, so a later backward pass is a SyncError."""
        self._is_closed = True
        self.groups.destroy()

    def _on_open_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._is_closed:
            raise SyncError(
                f"rank {self.groups.rank}: this gradient sync is closed, and DDP still calls it; to continue training, "
                "wrap the module in a new DistributedDataParallel and attach a new sync"
            )
        return self.on_bucket(bucket)
