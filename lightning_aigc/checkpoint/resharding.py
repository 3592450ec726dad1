"""Resharding: what a rank starts with from a snapshot that another number of ranks wrote.

Weights, optimizer states and gradients are those of `whole_state`. The position in the epoch becomes the same fraction
of it, at the same micro-batch of a window. A rank without a counterpart gets new random states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc.checkpoint.files.reader import Snapshot


def reshard(snapshot: Snapshot, rank: int, world_size: int) -> dict[str, Any]:
    """This rank's state; its loaders' states are None, and the loops' counters say where the loaders begin."""
    old = snapshot.world_size
    own: dict[str, Any] = snapshot.rank(rank % old)
    moment = own["moment"]
    moment["places"] = [None] * len(moment["places"])
    current = moment["loops"]["epoch_loop.batch_progress"]["current"]
    batches = _scaled(current["ready"], old / world_size, own["accumulate_grad_batches"])
    moment["cycle"]["index"] = batches
    metrics = moment["metrics"]
    for metric in metrics["epoch"]:  # sums of one rank: schedules get its mean so far instead
        name = metric["meta"]["name"] + ("_epoch" if metric["meta"]["on_step"] else "")
        value, batch_size = metric["value"], metric["batch_size"]
        metrics["callback"][name] = value if batch_size is None else value / batch_size
    metrics["epoch"] = []
    for name in current:
        current[name] = batches
    for state in moment["loops"]["state_dict"].get("combined_loader", ()):
        if "position" in state:  # a stateful loader that counts its batches, as ImageCaptionData does
            state["position"] = batches
    if rank >= old:
        moment["random"]["torch"] = torch.Generator().manual_seed(_seed(moment["random"]["torch"], rank)).get_state()
        moment["random"]["accelerator"] = None
    return own


def _scaled(batches: int, factor: float, window: int) -> int:
    """The same share of the epoch, at the same micro-batch of a window."""
    phase = batches % window
    return max(0, int(batches * factor) - phase) // window * window + phase


def _seed(state: Tensor, rank: int) -> int:
    return int(state.to(torch.int64).sum()) * 1000 + rank
