"""Process groups in one process, where every other rank immediately sends the same as this rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor

from lightning_aigc.gradient_sync.transport.collectives import Traffic
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups


class Done:
    def start(self, lane: int = 0) -> Done:
        return self

    def wait(self) -> None:
        pass


class EchoingGroup:
    """A CountedGroup that counts nothing. What is exchanged comes back as it was sent."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank
        self.started: list[str] = []

    def all_reduce(self, tensor: Tensor, kind: str = "values") -> Any:
        self.started.append("all_reduce")
        tensor.mul_(self.size)
        return Done()

    def reduce_scatter(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Any:
        self.started.append("reduce_scatter")
        out.copy_(tensor.view(self.size, -1)[self.rank]).mul_(self.size)
        return Done()

    def all_gather(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Any:
        self.started.append("all_gather")
        out.view(self.size, -1).copy_(tensor)
        return Done()

    def all_to_all(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Any:
        self.started.append("all_to_all")
        out.copy_(tensor)
        return Done()


class EchoingGroups(ProcessGroups):
    """Nodes of `inside` ranks each; `rank` is this one's place among the nodes."""

    def __init__(self, nodes: int = 2, inside: int = 1, rank: int = 0) -> None:
        self.traffic, self.rank, self.timeout = Traffic(), 0, timedelta(seconds=1)
        self.lanes = 5
        self.world_size = nodes * inside
        self.inside: Any = None if inside == 1 else EchoingGroup(inside)
        self.between: Any = EchoingGroup(nodes, rank)
        self.everyone: Any = self.between if inside == 1 else EchoingGroup(self.world_size)

    def destroy(self) -> None:
        pass
