"""Process groups of gradient sync: all ranks, those of a node, one rank of each node; and SyncError, a lost rank."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from lightning_aigc.cluster.topology import node_key, nodes_of
from lightning_aigc.errors import ConfigError, UserError
from lightning_aigc.gradient_sync.transport.chunked_exchange import chunked_where_slow
from lightning_aigc.gradient_sync.transport.collectives import CountedGroup, Traffic
from lightning_aigc.secrets import redact_text

DEFAULT_TIMEOUT = timedelta(minutes=30)


class ProcessGroups:
    """Groups that gradients are reduced over: `between` alone, or first `inside` a node and then `between` nodes.

    They are separate from the default group, whose collectives (DDP's buffers, Lightning's signals) run at any time.
    """

    def __init__(self, hierarchical: bool | Literal["auto"], timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Collective: every rank calls it. Raises: ConfigError for a hierarchy where nodes are uneven or only one."""
        self.traffic = Traffic()
        self._made: list[Any] = []
        self.world_size, self.rank, self.timeout = dist.get_world_size(), dist.get_rank(), timeout
        keys: list[Any] = [None] * self.world_size
        dist.all_gather_object(keys, node_key())
        self.nodes = nodes_of(keys)
        sizes = {len(ranks) for ranks in self.nodes}
        possible = len(self.nodes) > 1 and len(sizes) == 1 and sizes != {1}
        if hierarchical is True and not possible:
            raise ConfigError(
                f"hierarchical: true wants several nodes with equally many ranks, two or more; got {self.layout}; use"
                " auto"
            )
        self.inside: CountedGroup | None = None
        if possible and hierarchical is not False:
            inside = self._new_groups(self.nodes)
            between = self._new_groups([list(ranks) for ranks in zip(*self.nodes, strict=True)])
            self.inside = CountedGroup(inside, self.traffic, inside_node=True)
            everyone = self._new_groups([list(range(self.world_size))])
        else:
            between = everyone = self._new_groups([list(range(self.world_size))])
        self.between = CountedGroup(between, self.traffic)
        self.everyone = self.between if self.inside is None else CountedGroup(everyone, self.traffic)
        self.lanes = 1

    @property
    def ranks_inside(self) -> int:
        """Number of ranks that reduce among themselves first: 1 in a flat sync."""
        return 1 if self.inside is None else self.inside.size

    def chunk_on_slow_links(self) -> None:
        """Split large rows if the link between nodes is slow. Collective: measures the link for a moment."""
        chunked = chunked_where_slow(self.between.group)
        self.between.chunked = [] if chunked is None else [chunked]

    def add_lanes(self, count: int) -> None:
        """Give each group this many lanes in all, one for each collective of a unit. Collective."""
        for _ in range(count - self.lanes):
            if self.inside is not None:
                self.inside.add_lane(self._new_groups(self.nodes))
                self.between.add_lane(self._new_groups([list(ranks) for ranks in zip(*self.nodes, strict=True)]))
            self.everyone.add_lane(self._new_groups([list(range(self.world_size))]))
        self.lanes = count

    def destroy(self) -> None:
        """Destroy these groups, and keep the default group. A second call does nothing."""
        made, self._made = self._made, []
        for chunked in self.between.chunked if made else ():
            chunked.close()
        for group in made:
            with suppress(ValueError):  # destroying the default group destroys them as well
                if dist.is_initialized():
                    dist.destroy_process_group(group)

    @property
    def layout(self) -> str:
        """Ranks of each node, for an error.

        >>> ProcessGroups.layout.fget(type("Groups", (), {"nodes": [[0, 1], [2]]}))
        '2, 1 ranks on 2 node(s)'
        """
        return f"{', '.join(str(len(ranks)) for ranks in self.nodes)} ranks on {len(self.nodes)} node(s)"

    def _new_groups(self, groups: list[list[int]]) -> Any:
        """Make all of these groups, as every rank must, and return this rank's group."""
        mine = None
        for ranks in groups:
            made = dist.new_group(ranks, timeout=self.timeout)
            if self.rank in ranks:
                mine = made
                self._made.append(made)
        return mine


class SyncError(RuntimeError):
    """Gradients could not be added up: a rank is gone, stuck, or does something else."""


def explain(error: BaseException, groups: ProcessGroups, step: int) -> SyncError:
    """Return a collective's error as one that says where to look."""
    return SyncError(
        f"rank {groups.rank} of {groups.world_size} could not add up gradients in step {step}: "
        f"{type(error).__name__}: {reason_of(error)}. Most often another rank has stopped or hangs: look at its log "
        f"first; a rank that is only slow needs a longer timeout than {groups.timeout}"
    )


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message, of Gloo's without its source file and its advice.

    A line that ends with a colon gets the next one: alone it says nothing.
    """
    lines = str(error).strip().splitlines() or ["no message"]
    said = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return said.partition(" This is typically")[0].rpartition("] ")[2].strip(" .") if "/gloo/" in said else said


def stopped_by(rank: int, host: str, sentence: str) -> ConfigError:
    """Return the error of a rank that stops because another rank did, with that rank's sentence."""
    return ConfigError(f"rank {rank} ({host}) stopped, and this rank with it: {sentence}")


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise this rank's error, or the first one of another rank. Collective; does nothing if no rank has one.

    Call it where ranks worked apart, before a collective that a rank with an error would leave out.

    Raises: the rank's own error; ConfigError where another rank has one.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        sentence = None
        if error is not None:
            said = reason_of(error).partition(" Find a complete list")[0]  # Lightning's pointer to its documentation
            sentence = said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (socket.gethostname(), sentence))
        failed = ((rank, host, said) for rank, (host, said) in enumerate(everybody) if said is not None)
        for rank, host, said in failed if error is None else ():
            raise stopped_by(rank, host, said)
    if error is not None:
        raise error


@contextmanager
def errors_of_all_ranks() -> Iterator[None]:
    """Meet the other ranks at the end of the block, with an error if one rank has one. Collective.

    Raises: as `raise_on_all_ranks`.
    """
    failed = None
    try:
        yield
    except Exception as error:  # raised below, once the other ranks know of it
        failed = error
    raise_on_all_ranks(failed)


def error_sentence(error: Exception) -> str | None:
    """Return the sentence of an error that a user can do something about: a UserError, or a lost rank; else None."""
    if isinstance(error, UserError):
        text = str(error)
        # torch fills the text of a loader worker's error with the whole traceback
        return text.strip().rpartition("Error: ")[2] if "Original Traceback" in text else text
    return lost_rank_sentence(error) if isinstance(error, RuntimeError) else None


def lost_rank_sentence(error: RuntimeError) -> str | None:
    """Return the sentence of a failed collective, most often because another rank has ended; None for other errors."""
    if isinstance(error, SyncError):
        return str(error)
    if not is_of_a_collective(error):
        return None
    if "EADDRINUSE" in str(error):
        return (
            f"port {os.environ.get('MASTER_PORT')} of {os.environ.get('MASTER_ADDR')}, where the ranks meet, is in use"
            " by another process; run it with a free port, such as MASTER_PORT=29501 in front of the command, or"
            " without MASTER_PORT, and one is chosen"
        )
    rank = _first_set("RANK", "SLURM_PROCID", "LOCAL_RANK") or "of this process"
    return (
        f"rank {rank} lost the others: {reason_of(error)}. Another rank has stopped, hangs or cannot be reached; the"
        " first error in the ranks' logs says why"
    )


@contextmanager
def errors_as_warnings() -> Iterator[None]:
    """Warn of an error in the block, where it would hide the one that ended the training and skip other callbacks.

    After a lost rank each further collective fails too, which is no news.
    """
    ended_by = sys.exc_info()[1]
    try:
        yield
    except Exception as error:  # of any kind: the error that ended the training is the one to show
        if not (_is_of_lost_rank(error) and _is_of_lost_rank(ended_by)):
            said = f"after the training was stopped: {type(error).__name__}: {reason_of(error)}"
            warnings.warn(said, stacklevel=3)


def _is_of_lost_rank(error: BaseException | None) -> bool:
    return isinstance(error, SyncError) or (isinstance(error, RuntimeError) and is_of_a_collective(error))


def say_error(error: Exception, rank: int) -> None:
    """Print an error that ends a training of several ranks, before its end, which may take seconds; see `was_said`."""
    sentence = error_sentence(error)
    if sentence is None:
        print(f"rank {rank}: {type(error).__name__}: {reason_of(error)}", file=sys.stderr, flush=True)
        return
    if not is_said_by_first_rank(sentence):
        print(f"error: {redact_text(sentence)}", file=sys.stderr, flush=True)
    error.was_said = True  # type: ignore[attr-defined]


def was_said(error: Exception) -> bool:
    """Whether the sentence of this error has been printed."""
    return getattr(error, "was_said", False)


def is_said_by_first_rank(sentence: str, store: Any = None) -> bool:
    """Whether the first rank of this node prints the same error, as it does for data that all ranks refuse.

    Args: store: one that the ranks share; the process group's by default.
    """
    try:
        if store is None:
            if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
                return False
            store = dist.distributed_c10d._get_default_store()
        key = f"lightning_aigc/refused/{_first_set('GROUP_RANK', 'NODE_RANK', 'SLURM_NODEID')}"
        if is_first_of_node():
            store.set(key, sentence)
            return False
        store.wait([key], timedelta(seconds=2))
        return bool(store.get(key).decode() == sentence)
    except RuntimeError:  # the first rank has no error, or the store's process has ended
        return False


def is_first_of_node() -> bool:
    """Whether this process is the first rank of its node, or the only one."""
    return _first_set("LOCAL_RANK", "SLURM_LOCALID") in ("", "0")


def _first_set(*variables: str) -> str:
    return next((value for name in variables if (value := os.environ.get(name))), "")


def is_of_a_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it. Gloo's errors have no type of their own, but name its source files."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
