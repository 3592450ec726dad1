"""Conversion of trees of tensors, such as a checkpoint, between full tensors and this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_aigc.sharding.local_parts import local_part, sharded

State = dict[str, Any]


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nested value with `change` applied to everything that is not a dict, list or tuple."""
    if isinstance(tree, dict):
        return {key: map_tree(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = (map_tree(value, change) for value in tree)
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return change(tree)


def gathered(tree: Any, *, keep: bool) -> Any:
    """Return a tree with full tensors on the CPU. Collective: every rank calls it with an equal tree.

    Tensors are gathered one at a time, so that a device holds only one full tensor.
    Args: keep: whether this rank needs the result; otherwise each sharded tensor becomes None.
    """

    return map_tree(tree, lambda leaf: full_tensor(leaf, keep=keep) if isinstance(leaf, DTensor) else leaf)


@torch.no_grad()
def full_tensor(tensor: DTensor, *, keep: bool) -> Tensor | None:
    """Return a sharded tensor in full on the CPU, None on a rank that does not keep it. Collective."""
    mesh = tensor.device_mesh
    part = local_part(tensor.detach()).to(mesh.device_type)  # offloaded parts lie where the mesh has no backend
    full = sharded(part, mesh, tensor.placements, tensor.shape, tensor.stride()).full_tensor()
    return full.cpu() if keep else None


@torch.no_grad()
def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor as a DTensor, sharded like `like`. Not a collective.

    A tensor that is sharded already, or whose counterpart is not, is returned unchanged.
    """
    if isinstance(full, DTensor) or not isinstance(like, DTensor) or full.shape != like.shape:
        return full
    local = local_part(like)
    start, length = rows_of(like)
    part = full[start : start + length].to(local.device, full.dtype).clone()
    return sharded(part, like.device_mesh, like.placements, like.shape, like.stride())


def rows_of(tensor: DTensor) -> tuple[int, int]:
    """Return the first row and the number of rows that this rank holds of a row-sharded tensor."""
    rows, ranks = tensor.shape[0], tensor.device_mesh.size()
    each = -(-rows // ranks)
    start = min(rows, tensor.device_mesh.get_local_rank() * each)
    return start, min(rows, start + each) - start


def sharded_weights(saved: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return a state_dict whose weights are sharded like the module's."""
    current = dict(module.named_parameters())
    return {name: shard_like(value, current[name]) if name in current else value for name, value in saved.items()}


def sharded_states(saved: State, optimizer: torch.optim.Optimizer) -> State:
    """Return an optimizer's state_dict whose tensors are sharded like their parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = [place for group in saved["param_groups"] for place in group["params"]]
    of_place = dict(zip(places, parameters, strict=True))
    state = {
        place: {
            key: shard_like(value, of_place[place]) if isinstance(value, Tensor) else value
            for key, value in of_one.items()
        }
        for place, of_one in saved["state"].items()
    }
    return {**saved, "state": state}
