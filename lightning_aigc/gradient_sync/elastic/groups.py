"""ElasticGroups: the process group of the ranks that take part in an average, made anew when they change."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ProcessGroupGloo

from lightning_aigc.gradient_sync.elastic.quorum import Meeting, Quorum
from lightning_aigc.gradient_sync.transport.collectives import Collective, CountedGroup, Traffic
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups, SyncError

CONNECT_TIMEOUT = timedelta(seconds=60)
"""Time that the members of a meeting get to connect; all of them were there a moment ago."""
FIRST_WAIT_S, LONGEST_WAIT_S = 5e-4, 0.05


class ElasticGroups(ProcessGroups):
    """Groups of a rank that is a run of its own: alone in its world, and in `everyone` with those who are present."""

    def __init__(self, quorum: Quorum, timeout: timedelta) -> None:
        self.quorum, self.timeout, self.traffic = quorum, timeout, Traffic()
        self.world_size, self.rank, self.nodes, self.inside = 1, 0, [[0]], None
        self._ids: tuple[int, ...] = ()
        self._hold(ElasticGroup(None, 1, 0, self.traffic))

    def gather(self, meeting: Meeting) -> None:
        """Connect the members of a meeting, unless the last one had the same."""
        if meeting.ids != self._ids:
            self._ids = ()
            size, rank, store = len(meeting.members), meeting.place, self.quorum.store_of(meeting)
            self.present.drop()
            group = None if size == 1 else ProcessGroupGloo(store, rank, size, min(self.timeout, CONNECT_TIMEOUT))
            if group is not None:
                group._set_default_timeout(self.timeout)
            self._hold(ElasticGroup(group, size, rank, self.traffic))
            self._ids = meeting.ids
        self.present.follow(self.quorum, meeting)

    def disconnect(self) -> None:
        """Drop the group after an error, so that the others notice, and the next meeting makes a new one."""
        self._ids = ()
        self.present.drop()

    def destroy(self) -> None:
        self.disconnect()
        self.quorum.leave()

    def _hold(self, present: ElasticGroup) -> None:
        self.everyone = self.between = self.present = present


class ElasticGroup(CountedGroup):
    """CountedGroup of a Gloo group that torch.distributed does not know; data of a card goes through host memory."""

    def __init__(self, group: ProcessGroupGloo | None, size: int, rank: int, traffic: Traffic) -> None:
        self.group: Any = group
        self.size, self.rank, self.traffic, self.inside_node = size, rank, traffic, False
        self._quorum: Quorum | None = None
        self._meeting: Meeting | None = None

    def follow(self, quorum: Quorum, meeting: Meeting) -> None:
        """Stop waiting when a member of this meeting has died."""
        self._quorum, self._meeting = quorum, meeting

    def drop(self) -> None:
        self.group = None

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the tensor of member `root` to all."""
        host = tensor.cpu()
        options = BroadcastOptions()
        options.rootRank = root
        self._started(self.group and self.group.broadcast([host], options), host, tensor).wait()

    def all_reduce(self, tensor: Tensor, kind: str = "values") -> Collective:
        def start(lane: int) -> Arriving:
            self._count("all_reduce", 2 * tensor.nbytes, kind, lane)
            host = tensor.cpu()
            return self._started(self.group and self.group.allreduce([host], AllreduceOptions()), host, tensor)

        return Collective(start)

    def all_gather(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Collective:
        def start(lane: int) -> Arriving:
            self._count("all_gather", out.nbytes, kind, lane)
            if self.size == 1:
                return self._started(None, tensor, out)
            host = torch.empty_like(out, device="cpu")
            return self._started(self.group._allgather_base(host, tensor.cpu()), host, out)

        return Collective(start)

    def all_to_all(self, out: Tensor, tensor: Tensor, kind: str = "values") -> Collective:
        def start(lane: int) -> Arriving:
            self._count("all_to_all", tensor.nbytes, kind, lane)
            if self.size == 1:
                return self._started(None, tensor, out)
            host = torch.empty_like(out, device="cpu")
            return self._started(self.group.alltoall_base(host, tensor.cpu(), [], []), host, out)

        return Collective(start)

    def _started(self, work: Any, host: Tensor, out: Tensor) -> Arriving:
        return Arriving(work, host, out, self._is_aborted)

    def _is_aborted(self) -> bool:
        return self._quorum is not None and self._meeting is not None and self._quorum.is_aborted(self._meeting)


class Arriving:
    """Collective that has started; `wait` copies its result, or raises when a member has died."""

    def __init__(self, work: Any, host: Tensor, out: Tensor, is_aborted: Any) -> None:
        self._work, self._host, self._out, self._is_aborted = work, host, out, is_aborted

    def wait(self) -> None:
        """Wait for the result. Raises: SyncError, or Gloo's RuntimeError, if a member is gone."""
        pause = FIRST_WAIT_S
        while self._work is not None and not self._work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT_S)
            if pause == LONGEST_WAIT_S and self._is_aborted():
                raise SyncError("a rank has died during the average")
        if self._work is not None:
            self._work.wait()  # raises its error
        if self._out is not self._host:
            self._out.copy_(self._host)
