"""A snapshot that was taken on another number of ranks: what a rank of this run starts with.

Gradients of an open window are averaged over the old ranks: summed up over the new ones they are the same again. The
place in the epoch is the same share of it, at the same micro-batch of its window. A rank that had no counterpart draws
from random states of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc.checkpoint.catalog import Snapshot


def for_other_ranks(snapshot: Snapshot, rank: int, world_size: int) -> dict[str, Any]:
    """This rank's own state; its places are None, and its loops' counters say where the loaders are to begin."""
    old = snapshot.world_size
    own: dict[str, Any] = snapshot.rank(rank % old)
    if own["gradients"]:
        of_all = [snapshot.rank(k)["gradients"] for k in range(old)]
        own["gradients"] = {name: _mean([one[name] for one in of_all if name in one], old) for name in own["gradients"]}
    moment = own["moment"]
    moment["places"] = [None] * len(moment["places"])
    current = moment["loops"]["epoch_loop.batch_progress"]["current"]
    batches = _scaled(current["ready"], old / world_size, own["accumulate_grad_batches"])
    moment["cycle"]["index"] = batches
    metrics = moment["metrics"]
    for one in metrics["epoch"]:  # this rank's sums: other ranks have none, so schedules get the mean of until here
        name = one["meta"]["name"] + ("_epoch" if one["meta"]["on_step"] else "")
        metrics["callback"][name] = one["value"] if one["batch_size"] is None else one["value"] / one["batch_size"]
    metrics["epoch"] = []
    for name in current:
        current[name] = batches
    for state in moment["loops"]["state_dict"].get("combined_loader", ()):
        if "position" in state:  # ImageCaptionData's
            state["position"] = batches
    if rank >= old:
        moment["random"]["torch"] = torch.Generator().manual_seed(_seed(moment["random"]["torch"], rank)).get_state()
        moment["random"]["accelerator"] = None
    return own


def _scaled(batches: int, factor: float, window: int) -> int:
    """As far into the epoch, at the same micro-batch of a window."""
    phase = batches % window
    return max(0, int(batches * factor) - phase) // window * window + phase


def _mean(values: list[Tensor], count: int) -> Tensor:
    return torch.stack([value.double() for value in values]).sum(0).div(count).to(values[0].dtype)


def _seed(state: Tensor, rank: int) -> int:
    return int(state.to(torch.int64).sum()) * 1000 + rank
