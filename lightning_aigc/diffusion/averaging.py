"""Swap in averaged weights, from an EMA or a schedule-free optimizer, for sampling and saving."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import nn


def is_schedule_free(optimizer: Any) -> bool:
    """Whether the optimizer is schedule-free: `train()` and `eval()` swap its average in and out of the weights."""
    return any("train_mode" in group for group in optimizer.param_groups)


def loaded_averages(optimizer: Any, checkpoint: dict[str, Any]) -> list[Any]:
    """The optimizer with its state of a checkpoint, if it is schedule-free and so holds the average; else nothing."""
    if not is_schedule_free(optimizer) or not checkpoint.get("optimizer_states"):
        return []
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    return [optimizer]


@contextlib.contextmanager
def averaged(trained: list[nn.Parameter], ema: EMAModel | None, optimizers: Sequence[Any]) -> Iterator[None]:
    """Load the average into `trained` until the block ends, then restore the weights bit for bit."""
    free = [o for o in optimizers if is_schedule_free(o)]
    if ema is None and not free:
        yield
        return
    backup = [p.detach().clone() for p in trained]
    was_training = [bool(o.param_groups[0]["train_mode"]) for o in free]
    if ema is not None:
        ema.to(device=trained[0].device)
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
