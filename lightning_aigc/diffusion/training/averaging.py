"""Swap in averaged weights, from an EMA or a schedule-free optimizer, for sampling and saving."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_aigc.sharding.full_state import shard_like

if TYPE_CHECKING:
    from diffusers.training_utils import EMAModel


def is_schedule_free(optimizer: Any) -> bool:
    """Whether the optimizer is schedule-free: `train()` and `eval()` swap its average in and out of the weights."""
    return any("train_mode" in group for group in optimizer.param_groups)


def loaded_averages(optimizer: Any, checkpoint: dict[str, Any]) -> list[Any]:
    """The optimizer with its state of a checkpoint, if it is schedule-free and so holds the average; else nothing."""
    if not is_schedule_free(optimizer) or not checkpoint.get("optimizer_states"):
        return []
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    return [optimizer]


def follow_shards(ema: EMAModel, trained: Sequence[nn.Parameter]) -> EMAModel:
    """Cut the average as the weights are, if a strategy has sharded them since; returns it."""
    if any(isinstance(parameter, DTensor) for parameter in trained):
        ema.shadow_params = [shard_like(value, p) for value, p in zip(ema.shadow_params, trained, strict=True)]
    return ema


@contextlib.contextmanager
def averaged(trained: list[nn.Parameter], ema: EMAModel | None, optimizers: Sequence[Any]) -> Iterator[None]:
    """Load the average into `trained` until the block ends, then restore the weights bit for bit."""
    free = [o for o in optimizers if is_schedule_free(o)]
    averages = ema.shadow_params if ema is not None else [p for o in free for p in o.param_groups[0]["params"]]
    is_gathered = isinstance(next(iter(averages), None), DTensor) and not isinstance(trained[0], DTensor)
    if (ema is None and not free) or is_gathered:  # a sharded model's average is swapped in before it is gathered
        yield
        return
    backup = [p.detach().clone() for p in trained]
    was_training = [bool(o.param_groups[0]["train_mode"]) for o in free]
    if ema is not None:
        follow_shards(ema, trained).to(device=trained[0].device)
        ema.copy_to(trained)
    else:
        for optimizer in free:
            optimizer.eval()
    try:
        yield
    finally:
        for optimizer, was in zip(free, was_training, strict=True):
            if was:
                optimizer.train()
        # A schedule-free optimizer swaps by interpolation, which rounds, so the weights are restored from the copy.
        with torch.no_grad():
            for parameter, value in zip(trained, backup, strict=True):
                parameter.copy_(value)
