"""Quorum: the ranks of each average, agreed on at a store, and whether the average counts.

Every rank is a run of its own, and may start, end or die at any time. A meeting is one average. A rank that is ready
says so; when all ranks with a heartbeat are ready, the first that sees it writes the list of members. Each member votes
on whether the average arrived, and the first that sees all votes, or a member that died without one, writes the
outcome. List and outcome are written once (compare_set), so that all ranks read the same.

The semantics are torchft's (https://github.com/pytorch/torchft): a quorum for each step, and no step that only some
ranks have taken.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.transport.process_groups import SyncError
from lightning_aigc.gradient_sync.watch.stall_watchdog import print_line

BEAT_S, DEAD_AFTER_S = 0.5, 20.0
"""Time between two heartbeats, and time without one after which a rank counts as dead."""
POLL_S = 0.02
TOO_FEW_S, SLOW_S = 2.0, 30.0
"""Seconds of a wait before the console says that runs are missing, and that one that is there is not ready."""
CONNECT_S = 60.0
KEPT_MEETINGS = 2
"""Meetings whose keys stay in the store."""
COMMIT, ABORT, FAILED = "commit", "abort", "failed"
GONE, FINISHED = "gone", "finished"
"""Last heartbeat of a rank that died or was stopped, and of one that has taken all its steps."""


@dataclass(frozen=True)
class Standing:
    """A rank's position in the run, as it reports it at a meeting."""

    id: int
    averages: int
    """Averages that its weights have seen."""
    bits: int
    """Checksum of its weights after the last average."""
    steps: int
    """Steps that it took since."""


@dataclass(frozen=True)
class Meeting:
    """Members of one average, the same list on every one of them."""

    number: int
    members: tuple[Standing, ...]
    place: int
    """This rank's place among them."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(member.id for member in self.members)

    @property
    def leader(self) -> int:
        """Place of the first member that has seen the most averages: all others have its weights, or copy them."""
        return max(range(len(self.members)), key=lambda place: (self.members[place].averages, -place))

    def is_behind(self, place: int) -> bool:
        """Whether this member has other weights than the leader."""
        leader, member = self.members[self.leader], self.members[place]
        return (member.averages, member.bits) != (leader.averages, leader.bits)

    @property
    def behind(self) -> list[int]:
        return [place for place in range(len(self.members)) if self.is_behind(place)]

    @property
    def contributors(self) -> list[int]:
        """Places of the members whose steps count: those that took some, from the leader's weights."""
        return [p for p, member in enumerate(self.members) if member.steps > 0 and not self.is_behind(p)]


class Quorum:
    """One rank's view of the meetings at a store, with its heartbeat.

    Args:
        min_ranks: Ranks that a meeting waits for. Those that this rank has met and that have finished count.
        job: What all ranks must have in common, in words.
        is_stopped: Returns whether this run is told to end, which ends a wait.
    Raises: ConfigError if no store answers at the address, or the ranks there have another job.
    """

    def __init__(
        self,
        address: str,
        min_ranks: int,
        timeout: timedelta,
        job: str = "",
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._address, self._min_ranks, self._timeout, self._is_stopped = address, min_ranks, timeout, is_stopped
        self._store = open_store(address)
        theirs = self._store.compare_set("job", "", job).decode()
        if theirs != job:
            raise ConfigError(
                f"this run has {job}, and the runs at {address} have {theirs}; start it with their config, or give it "
                "another store"
            )
        self.id = int(self._store.add("joined", 1))
        self._store.add("meeting", 0)
        self._seen: dict[int, tuple[str, float]] = {}
        self._met: set[int] = set()
        self._ended = threading.Event()
        self._beats_from = open_store(address)  # a process group that connects blocks its own
        self._heart = threading.Thread(target=self._beat, name="quorum heartbeat", daemon=True)

    def store_of(self, meeting: Meeting) -> Store:
        """Return the part of the store for a meeting's process group."""
        return PrefixStore(f"group/{meeting.number}", self._store)

    def meet(self, averages: int, bits: int, steps: int) -> Meeting | None:
        """Wait until this rank is a member of a meeting. Returns: the meeting; None if this run is told to end.

        Raises: SyncError if fewer ranks than wanted are ready within the timeout, and if the store is gone.
        """
        with self._store_answers():
            return self._meet(averages, bits, steps)

    def _meet(self, averages: int, bits: int, steps: int) -> Meeting | None:
        if self._heart.ident is None:
            self._heart.start()
        deadline = time.monotonic() + self._timeout.total_seconds()
        mine = Standing(self.id, averages, bits, steps)
        while True:
            number = self._number()
            if not self._has(f"members/{number}"):
                self._store.set(f"ready/{number}/{self.id}", json.dumps(asdict(mine)))
                if not self._wait_for_members(number, deadline):
                    return None
            members = tuple(Standing(**member) for member in json.loads(self._get(f"members/{number}")))
            place = next((i for i, member in enumerate(members) if member.id == self.id), None)
            if place is not None:
                self._met.update(member.id for member in members)
                return Meeting(number, members, place)
            self._outcome(number, [member.id for member in members])  # this rank came too late for it

    def settle(self, meeting: Meeting, *, arrived: bool) -> bool:
        """Vote, and return whether the average counts: only if it arrived at all members."""
        with self._store_answers():
            self._store.set(f"vote/{meeting.number}/{self.id}", COMMIT if arrived else FAILED)
            return self._outcome(meeting.number, meeting.ids) == COMMIT

    def is_aborted(self, meeting: Meeting) -> bool:
        """Whether another member has seen that the average cannot arrive."""
        self._decide(meeting.number, meeting.ids)
        return self._has(f"outcome/{meeting.number}") and self._get(f"outcome/{meeting.number}") == ABORT

    def leave(self, *, has_finished: bool = False) -> None:
        """Tell the others at once that this rank takes no part any more. A second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._heart.ident is not None:
            self._heart.join()
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(f"beat/{self.id}", FINISHED if has_finished else GONE)

    def why_left(self, rank: int) -> str:
        """Return in words why a rank takes part no more."""
        return "has finished" if self._last_beat(rank) == FINISHED else "was stopped, or does not answer any more"

    # The list of members

    def _wait_for_members(self, number: int, deadline: float) -> bool:
        """Return True when the list of members is there, and False if this run is told to end."""
        start, is_said = time.monotonic(), False
        while not self._has(f"members/{number}"):
            if self._is_stopped():
                self._store.delete_key(f"ready/{number}/{self.id}")
                return self._has(f"members/{number}")  # written a moment ago: the others count on this rank
            alive = self._alive(range(1, int(self._store.add("joined", 0)) + 1))
            ready = [rank for rank in alive if self._has(f"ready/{number}/{rank}")]
            wanted = self._min_ranks - sum(self._last_beat(rank) == FINISHED for rank in self._met)
            is_late = time.monotonic() > deadline
            if len(ready) >= wanted and (ready == alive or is_late):
                standings = [json.loads(self._get(f"ready/{number}/{rank}")) for rank in ready]
                self._store.compare_set(f"members/{number}", "", json.dumps(standings))
            elif is_late:
                raise SyncError(
                    f"{len(ready)} rank(s) were ready for an average at {self._address} within {self._timeout}, wanted "
                    f"{wanted}; start the missing ones, or lower min_ranks"
                )
            else:
                waited_s = time.monotonic() - start
                is_said = is_said or self._say_wait(waited_s, len(alive), wanted, sorted(set(alive) - set(ready)))
                time.sleep(POLL_S)
        return True

    def _say_wait(self, waited_s: float, alive: int, wanted: int, slow: list[int]) -> bool:
        """Say after a while which runs this one waits for. Returns: whether it was said."""
        if alive < wanted and waited_s > TOO_FEW_S:
            print_line(
                f"waiting for {wanted - alive} more run(s) at {self._address} (min_ranks: {self._min_ranks}), up to "
                f"{self._timeout}; start them, or stop this run and resume it with a lower min_ranks"
            )
        elif slow and waited_s > SLOW_S:
            names = ", ".join(map(str, slow))
            print_line(f"waiting for run(s) {names} at {self._address}, up to {self._timeout}")
        else:
            return False
        return True

    def _alive(self, ranks: Sequence[int]) -> list[int]:
        """Return those of the ranks whose heartbeat changes; a rank that has never met anyone has none."""
        alive, now = [], time.monotonic()
        for rank in ranks:
            beat = self._last_beat(rank)
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, now
            has_left = beat in (GONE, FINISHED)
            if not has_left and now - self._seen[rank][1] > DEAD_AFTER_S:
                self._store.compare_set(f"beat/{rank}", beat, GONE)  # for those who come later
            elif not has_left or rank == self.id:
                alive.append(rank)
        return alive

    def _last_beat(self, rank: int) -> str:
        return self._get(f"beat/{rank}") if self._has(f"beat/{rank}") else GONE

    # The outcome

    def _outcome(self, number: int, ids: Sequence[int]) -> str:
        while not self._has(f"outcome/{number}"):
            if self._number() > number:  # this rank slept through it, and its keys are deleted
                return ABORT
            self._decide(number, ids)
            time.sleep(POLL_S)
        outcome = self._get(f"outcome/{number}")
        self._store.compare_set("meeting", str(number), str(number + 1))
        self._forget(number - KEPT_MEETINGS)
        return outcome

    def _decide(self, number: int, ids: Sequence[int]) -> None:
        """Write the outcome if it can be told."""
        votes = {rank: self._get(f"vote/{number}/{rank}") for rank in ids if self._has(f"vote/{number}/{rank}")}
        missing = [rank for rank in ids if rank not in votes]
        if FAILED in votes.values() or self._alive(missing) != missing:
            self._store.compare_set(f"outcome/{number}", "", ABORT)
        elif not missing:
            self._store.compare_set(f"outcome/{number}", "", COMMIT)

    def _forget(self, number: int) -> None:
        if self._has(f"members/{number}"):
            for rank in range(1, int(self._store.add("joined", 0)) + 1):
                self._store.delete_key(f"ready/{number}/{rank}")
                self._store.delete_key(f"vote/{number}/{rank}")
            for key in ("members", "outcome"):
                self._store.delete_key(f"{key}/{number}")

    # The store

    @contextmanager
    def _store_answers(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise SyncError(
                f"the store at {self._address}, at which runs meet, does not answer any more; start it again, and each "
                "run from its last checkpoint"
            ) from error

    def _number(self) -> int:
        return int(self._get("meeting"))

    def _get(self, key: str) -> str:
        return str(self._store.get(key).decode())

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _beat(self) -> None:
        beats = 0
        while not self._ended.is_set():
            beats += 1
            try:
                self._beats_from.set(f"beat/{self.id}", str(beats))
            except RuntimeError:  # the store is gone, which the next meeting says
                return
            self._ended.wait(BEAT_S)


def host_and_port(address: str) -> tuple[str, int]:
    """Return both parts of HOST:PORT. Raises: ConfigError if they are not there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"rendezvous must be HOST:PORT, such as 10.0.0.1:29400; got {address!r}")
    return host, int(port)


def open_store(address: str) -> Store:
    """Connect to the store at HOST:PORT. Raises: ConfigError if nothing answers there."""
    host, port = host_and_port(address)
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))
    except RuntimeError as error:
        raise ConfigError(
            f"no store answers at {address}; start one that outlives the ranks: "
            f"python -m lightning_aigc.gradient_sync.elastic --port {port}"
        ) from error
    return PrefixStore("lightning_aigc/elastic", store)
