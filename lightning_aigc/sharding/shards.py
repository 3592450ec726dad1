"""Sharded tensors as plain values of a snapshot: {"first_row", "rows", "part"}, readable by any number of ranks."""

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
    """Return a nested value with each sharded tensor as a dict of this rank's rows, in shared memory."""

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        return {"first_row": rows_of(leaf)[0], "rows": leaf.shape[0], "part": local_part(leaf.detach())}

    return map_tree(tree, plain)


def from_shards(tree: Any, mesh: DeviceMesh, device: torch.device) -> Any:
    """Return the input of `to_shards`, on a mesh with the same number of ranks."""
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
    """Whether a nested value holds a sharded tensor in the form of `to_shards`."""
    if _is_shard(tree):
        return True
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return any(map(has_shards, inside))


def joined(trees: Sequence[Any], *, mean: bool = False) -> Any:
    """Return a nested value with full tensors from the trees of all ranks that saved; other values are the first's.

    Args: mean: replace floating-point tensors that are not sharded by their mean over the ranks.
    """
    first = trees[0]
    if _is_shard(first):
        return _full(trees)
    if not mean and not has_shards(first):  # such as a callback's records, of which rank 0 may have more
        return first
    if isinstance(first, dict):
        return {key: joined([tree[key] for tree in trees], mean=mean) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(joined(list(of_all), mean=mean) for of_all in zip(*trees, strict=True))
    if mean and isinstance(first, Tensor) and first.is_floating_point():
        return sum(tree.double() for tree in trees).div(len(trees)).to(first.dtype)
    return first


def _full(trees: Sequence[Any]) -> Tensor:
    """Join the rows of all ranks. Rows on several nodes become their mean: gradients of an open window differ."""
    of_row: dict[int, list[Tensor]] = {}
    for tree in trees:
        of_row.setdefault(tree["first_row"], []).append(tree["part"])
    parts = [of_row[row] for row in sorted(of_row)]
    return torch.cat(
        [joined(copies, mean=True) if len(copies) > 1 else copies[0] for copies in parts if len(copies[0])]
        or [trees[0]["part"]]
    )


def _is_shard(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == KEYS
