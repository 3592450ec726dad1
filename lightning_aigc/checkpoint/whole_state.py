"""A snapshot's weights and optimizer states whole, so that any strategy on any number of ranks continues from them.

Ranks write parts where the strategy shares out what a rank stores: rows of tensors (zero_2, zero_3), optimizer states
by parameter (zero_1), or a model of each rank's own (npu_sparse in mode local, whose next average this anticipates).
"""

from __future__ import annotations

from collections import ChainMap
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.checkpoint.files.reader import Snapshot
from lightning_aigc.sharding.shards import has_shards, joined

State = dict[str, Any]
AVERAGED = ("state_dict", "optimizer_states", "ema")
"""Keys of Lightning's checkpoint that are averaged over ranks that train models of their own."""


def whole_checkpoint(snapshot: Snapshot) -> State:
    """Lightning's checkpoint with whole tensors and all optimizer states."""
    return whole_state(snapshot, snapshot.rank(0))[0]


def whole_state(snapshot: Snapshot, own: State) -> tuple[State, State]:
    """Lightning's checkpoint and the gradients of an open window, whole and the same on every rank.

    Args: own: a rank's state, with the parts of the checkpoint that are this rank's.
    """
    checkpoint: State = snapshot.shared() | own["checkpoint"]
    shares = "states" in (own["strategy"] or {})
    is_split = shares or "state_dict" in own["checkpoint"]
    if not is_split and not own["gradients"]:
        return checkpoint, {}
    ranks = [snapshot.rank(k) for k in range(snapshot.world_size)]
    if shares:
        of_optimizers = zip(*(rank["strategy"]["states"] for rank in ranks), strict=True)
        checkpoint["optimizer_states"] = [
            {**described, "state": dict(ChainMap(*of_one))}
            for described, of_one in zip(checkpoint["optimizer_states"], of_optimizers, strict=True)
        ]
    elif is_split:
        averaged = not has_shards(own["checkpoint"])
        for key in AVERAGED if averaged else own["checkpoint"]:
            if key in checkpoint:
                checkpoint[key] = joined([rank["checkpoint"][key] for rank in ranks], mean=averaged)
    return checkpoint, _mean_gradients([rank["gradients"] for rank in ranks])


def _mean_gradients(of_ranks: list[State]) -> State:
    """Gradients whose mean over any number of ranks is what the mean over these ranks was."""
    names = {name: None for gradients in of_ranks for name in gradients}
    found = {name: [gradients[name] for gradients in of_ranks if name in gradients] for name in names}
    return {
        name: joined(values) if has_shards(values) else _mean(values, len(of_ranks)) for name, values in found.items()
    }


def _mean(values: list[Tensor], count: int) -> Tensor:
    return torch.stack([value.double() for value in values]).sum(0).div(count).to(values[0].dtype)
