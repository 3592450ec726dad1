"""Agreements of all ranks before there is a process group: who takes part, and the order of devices.

Each rank reports at one store. A rank that stops because of its own files or settings says so there; otherwise the
others would wait for it until the timeout.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from lightning_aigc._lightning import SLURMEnvironment, TorchElasticEnvironment
from lightning_aigc.cluster.topology import Topology, device_order, read_topology
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.transport.process_groups import SyncError, is_said_by_first_rank, stopped_by

POLL_S = 0.1
SAY_FAREWELL_S = 10.0
"""Time that a stopping rank gives the others to read its reason, because its process may hold the store."""
_opened = 0
"""Number of stores that this process has opened; a store that outlives a process group keeps its keys."""
_stopped_at: Store | None = None
"""Store at which this rank has told the others, or was told, why they stop."""


def open_store(rank: int, ranks: int, timeout: timedelta | None) -> Store:
    """Open the store at MASTER_ADDR and MASTER_PORT that all ranks share before there is a process group."""
    global _opened
    timeout = timeout or default_pg_timeout
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps it, else rank 0
    store: Store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        ranks,
        is_master=rank == 0 and not has_agent,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _opened += 1
    return PrefixStore(f"lightning_aigc/attempt_{attempt}/{_opened}", store)


def wait_for_ranks(store: Store, rank: int, ranks: int, timeout: timedelta | None, strategy: str) -> None:
    """Wait until every rank has called this. Collective.

    Raises: ConfigError if another rank said that it stops, or has another strategy; SyncError after the timeout, with
        the missing ranks.
    """
    global _stopped_at
    timeout = timeout or default_pg_timeout
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(f"here/{rank}", socket.gethostname())
    own = json.dumps([rank, socket.gethostname(), strategy])
    first, first_host, of_first = json.loads(store.compare_set("strategy", "", own))
    if of_first != strategy:
        sentence = (
            f"rank {rank} ({socket.gethostname()}) runs trainer.strategy {strategy}, and rank {first} ({first_host})"
            f" {of_first}; give every node the same command"
        )
        _stopped_at = store
        _tell(store, rank, ranks, sentence)
        raise ConfigError(sentence)
    arrived = store.add("arrived", 1)
    while arrived < ranks:
        if store.check(["failed"]):
            by, host, sentence = json.loads(store.get("failed"))
            store.add("told", 1)
            _stopped_at = store
            raise stopped_by(by, host, sentence)
        if time.monotonic() > deadline:
            missing = ", ".join(str(other) for other in range(ranks) if not store.check([f"here/{other}"]))
            raise SyncError(
                f"rank {rank} of {ranks} waited {timeout} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
                f"for rank(s) {missing}; look at their logs, whether their nodes have started, and whether they run"
                f" another trainer.strategy than {strategy}"
            )
        time.sleep(POLL_S)
        arrived = store.add("arrived", 0)


def tell_others(sentence: str) -> bool:
    """Tell the ranks that wait in `wait_for_ranks` why this rank stops; does nothing without a launcher of ranks.

    Returns: whether the first rank of this node stops with the same sentence, and so prints it.
    """
    try:
        launcher = next((kind() for kind in (TorchElasticEnvironment, SLURMEnvironment) if kind.detect()), None)
        if launcher is None or dist.is_initialized() or launcher.world_size() == 1:
            return False
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = launcher.main_address, str(launcher.main_port)
        rank, ranks = launcher.global_rank(), launcher.world_size()
        store = _stopped_at or open_store(rank, ranks, timedelta(seconds=SAY_FAREWELL_S))
        if launcher.local_rank() == 0:
            is_said_by_first_rank(sentence, store)
        if _stopped_at is None:
            _tell(store, rank, ranks, sentence)
        return launcher.local_rank() != 0 and is_said_by_first_rank(sentence, store)
    except (RuntimeError, ValueError):  # the store is gone, so nobody waits at it
        return False


def _tell(store: Store, rank: int, ranks: int, sentence: str) -> None:
    """Leave the sentence in the store, and wait for a while until all ranks have read it."""
    deadline = time.monotonic() + SAY_FAREWELL_S
    if not store.check(["failed"]):
        store.set("failed", json.dumps([rank, socket.gethostname(), sentence]))
    told = store.add("told", 1)
    while told < ranks and time.monotonic() < deadline:
        time.sleep(POLL_S)
        told = store.add("told", 0)


_agreed: dict[tuple[int, ...], list[int]] = {}
"""Orders agreed on in this process, by the devices' indices; a later fit already has a process group."""


def agree_on_order(
    indices: Sequence[int], open_store: Callable[[], Store], node: int, *, decides: bool
) -> tuple[list[int], str]:
    """Return these indices of devices in the order of a node's ranks, and a line to print where the order changed.

    One rank of each node asks the tool and tells the others: a rank that asked by itself and got no answer would keep
    the old order, and share a device with another rank.

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
