"""What every gradient sync offers to the strategy and to GradientCompressor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.gradient_sync.hook import attach_hook
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups
from lightning_aigc.gradient_sync.transport.sync_error import SyncError
from lightning_aigc.gradient_sync.watch.step_report import StepReport


class Sync(ABC):
    """Keeps the ranks of a DistributedDataParallel model together; one for each model."""

    has_rank_local_parameters = False
    """Whether the ranks' parameters and optimizers differ between two averages."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self.step = self.skipped_steps = 0
        self.report: StepReport | None = None

    @abstractmethod
    def attach(self, ddp: DistributedDataParallel) -> None:
        """Become the communication hook of this model."""

    @abstractmethod
    def finish_step(self) -> StepReport | None:
        """End the sync of a backward pass and say how it went; None before the first one."""

    def after_optimizer_step(self) -> None:  # noqa: B027  most syncs have nothing to do
        """Do what follows a step of the optimizer; every rank calls it."""

    def average_parameters(self) -> None:  # noqa: B027
        """Average the parameters now if they differ between ranks: after training, and before a checkpoint."""

    def set_early_choice(self, enabled: bool) -> None:  # noqa: B027
        """Say whether a sparse mode may choose by the sum of the micro-batches so far."""

    def describe_wait(self) -> list[str]:
        """Return lines on what this rank waits for, as seen from another thread."""
        return [f"step {self.step} of gradient sync", *self.groups.traffic.describe_recent()]

    def needs_all_states(self, state: dict[str, Any]) -> bool:
        """Whether `load_state_dict` needs the states of all ranks, and this rank's own is not enough."""
        return False

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as plain CPU tensors and numbers."""

    @abstractmethod
    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> list[str]:
        """Load the states of all ranks that saved; returns sentences on what cannot be exact."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the process groups; DDP keeps its hook, so a backward pass after this is a SyncError."""


class BucketSync(Sync):
    """A sync that takes DDP's buckets as they are."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__(groups)
        self._is_closed = False

    def attach(self, ddp: DistributedDataParallel) -> None:
        attach_hook(ddp, self._on_open_bucket)

    def close(self) -> None:
        self._is_closed = True
        self.groups.destroy()

    @abstractmethod
    def _on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket of gradients, and return the future of what DDP shall have in its place."""

    def _on_open_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._is_closed:
            raise SyncError("this gradient sync was closed, and DDP calls it still; make a new DistributedDataParallel")
        return self._on_bucket(bucket)
