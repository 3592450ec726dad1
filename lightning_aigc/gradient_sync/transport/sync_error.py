"""SyncError: the error of a gradient sync that lost a rank."""

from __future__ import annotations

import torch.distributed as dist

from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups


class SyncError(RuntimeError):
    """Gradients could not be added up: a rank is gone, stuck, or does something else."""


def explain(error: BaseException, groups: ProcessGroups, step: int) -> SyncError:
    """Return a collective's error as one that says where to look."""
    said = str(error).strip().splitlines() or ["no message"]
    return SyncError(
        f"rank {groups.rank} of {groups.world_size} could not add up gradients in step {step}: "
        f"{type(error).__name__}: {said[0]}. Most often another rank has stopped or hangs: look at its log first; a "
        f"rank that is only slow needs a longer timeout than {groups.timeout}"
    )


def stopped_by(rank: int, host: str, sentence: str) -> ConfigError:
    """Return the error of a rank that stops because another rank did, with that rank's sentence."""
    return ConfigError(f"rank {rank} ({host}) stopped, and this rank with it: {sentence}")


def is_of_a_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it. Gloo's errors have no type of their own, but name its source files."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
