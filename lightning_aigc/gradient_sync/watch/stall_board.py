"""Messages of stalled ranks through the process group's store; collectives are blocked then."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

POLL_S = 0.2
MOST_NAMED = 8


class StallBoard:
    """Board with a line of each stalled rank, which all ranks read. Its methods never raise: the store may be gone."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._answers = True

    @classmethod
    def open(cls, rank: int, world_size: int, timeout_s: float) -> StallBoard | None:
        """Return the board of the default process group; None where its store cannot be used from a second thread."""
        try:
            default: Any = distributed_c10d._get_default_store()
            store = default.clone()
            store.set_timeout(timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError):
            return None
        return cls(PrefixStore("stall_watchdog", store), rank, world_size)

    def post(self, where: str) -> None:
        """Post that this rank is stalled at this place."""
        self._try(lambda: self._store.set(str(self._rank), json.dumps(where)))

    def clear(self) -> None:
        """Remove this rank's line, because it makes progress again."""
        self._try(lambda: self._store.delete_key(str(self._rank)))

    def wait_for_posts(self, seconds: float) -> dict[int, str]:
        """Return each stalled rank's line, when all have one or after this time."""
        deadline = time.monotonic() + seconds
        while True:
            posts = self._posts()
            if len(posts) == self._world_size or not self._answers or time.monotonic() >= deadline:
                return posts
            time.sleep(POLL_S)

    def lines(self, posts: Mapping[int, str]) -> list[str]:
        """Return a line for each other rank."""
        if not self._answers:
            return ["  the store that ranks met at does not answer: rank 0's machine is gone or cannot be reached"]
        return [
            f"  rank {rank}: {posts.get(rank, 'no answer: stopped, killed or out of reach')}"
            for rank in range(self._world_size)
            if rank != self._rank
        ]

    def sentence(self, posts: Mapping[int, str]) -> str:
        """Return the beginning of a sentence: the ranks that give no answer, or the place where each waits."""
        if not self._answers:
            return "the store that ranks met at does not answer, so rank 0's machine may be gone; "
        silent = [rank for rank in range(self._world_size) if rank not in posts]
        if silent:
            return f"no answer from {_named(silent)}, so look there first (stopped, killed or out of reach); "
        ranks_at: dict[str, list[int]] = {}
        for rank, where in sorted(posts.items()):
            ranks_at.setdefault(where, []).append(rank)
        places = [f"{_named(ranks)} at {where}" for where, ranks in ranks_at.items()]
        return f"{'; '.join(places[:MOST_NAMED])}; "

    def _posts(self) -> dict[int, str]:
        posts: dict[int, str] = {}
        for rank in range(self._world_size):
            has_post = self._try(lambda rank=rank: self._store.check([str(rank)]))
            if has_post:
                text = self._try(lambda rank=rank: self._store.get(str(rank)))
                if text is not None:
                    posts[rank] = json.loads(text)
        return posts

    def _try(self, call: Any) -> Any:
        if not self._answers:
            return None
        try:
            return call()
        except (RuntimeError, ValueError):  # DistError among them: the store's machine is gone
            self._answers = False
            return None


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"
