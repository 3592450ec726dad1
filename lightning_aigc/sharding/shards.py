"""Sharded tensors as plain values for a snapshot: {"first_row", "rows", "part"}, which any number of ranks can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_aigc.sharding.full_state import map_tree, rows_of
from lightning_aigc.sharding.local_parts import local_part, sharded

KEYS = {"first_row", "rows", "part"}


def to_shards(tree: Any) -> Any:
    """Return a nested value with each sharded tensor as a dict of this rank's rows, sharing their memory."""

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        return {"first_row": rows_of(leaf)[0], "rows": leaf.shape[0], "part": local_part(leaf.detach())}

    return map_tree(tree, plain)


def from_shards(tree: Any, mesh: DeviceMesh, device: torch.device) -> Any:
    """Return what `to_shards` was given, on a mesh of as many ranks."""
    if _is_shard(tree):
        part = tree["part"].to(device)
        shape = torch.Size([tree["rows"], *part.shape[1:]])
        stride = torch.empty(shape, device="meta").stride()
        return sharded(part, mesh, [Shard(0)], shape, stride)
    if isinstance(tree, dict):
        return {key: from_shards(value, mesh, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(from_shards(value, mesh, device) for value in tree)
    return tree


def has_shards(tree: Any) -> bool:
    """Whether a nested value holds what `to_shards` makes of a sharded tensor."""
    if _is_shard(tree):
        return True
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return any(map(has_shards, inside))


def recut(trees: Sequence[Any], rank: int, ranks: int) -> Any:
    """Return the rows of a rank among `ranks`, from the trees of all ranks that saved; the rest is the first tree's."""
    first = trees[0]
    if _is_shard(first):
        rows = first["rows"]
        each = -(-rows // ranks)
        start = min(rows, rank * each)
        return {"first_row": start, "rows": rows, "part": _rows(trees, start, min(rows, start + each))}
    if isinstance(first, dict):
        return {key: recut([tree[key] for tree in trees], rank, ranks) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(recut(list(of_all), rank, ranks) for of_all in zip(*trees, strict=True))
    return first


def _rows(trees: Sequence[Any], start: int, stop: int) -> Tensor:
    parts = []
    for tree in trees:
        part, at = tree["part"], tree["first_row"]
        low, high = max(start, at), min(stop, at + len(part))
        if low < high:
            parts.append(part[low - at : high - at])
    return torch.cat(parts) if parts else trees[0]["part"][:0].clone()


def _is_shard(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == KEYS
