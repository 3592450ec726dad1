"""The order of a node's devices under its ranks: one rank of each node asks for the links, and tells the others.

If each rank asked by itself, a rank whose tool does not answer would keep the old order, and share another rank's card.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_aigc.cluster.topology import Topology, device_order, read_topology

_agreed: dict[tuple[int, ...], list[int]] = {}
"""The orders agreed on in this process, by the devices' indices: a later fit finds a process group already."""


def agree_on_order(
    indices: Sequence[int], open_store: Callable[[], Store], node: int, *, decides: bool
) -> tuple[list[int], str]:
    """Return these indices of devices in the order of a node's ranks, and a line to print where the order changed.

    Args: decides: whether this is the rank of its `node` that asks the tool; the node's other ranks wait for it.
    """
    if "RANK_TABLE_FILE" in os.environ:
        return list(indices), "keeps the devices in their order: RANK_TABLE_FILE gives each rank its own"
    key = tuple(indices)
    if key not in _agreed:
        if dist.is_initialized():
            return list(indices), ""
        store = open_store()
        name = f"devices of node {node}"
        if decides:
            store.set(name, json.dumps(ordered(indices, read_topology().topology)))
        _agreed[key] = json.loads(store.get(name))
    order = _agreed[key]
    return order, f"puts the ranks of a node on its devices in the order {order}, by their links" * (
        order != [*indices]
    )


def ordered(indices: Sequence[int], topology: Topology | None) -> list[int]:
    """Return these indices, each followed by the closest remaining; unchanged where the topology lacks some."""
    if topology is None or not all(index < len(topology.devices) for index in indices):
        return list(indices)
    return [indices[place] for place in device_order(topology.part(indices), len(indices))]
