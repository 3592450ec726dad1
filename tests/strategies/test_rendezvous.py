"""Ranks that meet before the process group: who is missing is named, and a rank that stops says why."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync import SyncError
from lightning_aigc.strategies import rendezvous
from lightning_aigc.strategies.rendezvous import open_store, tell_others, wait_for_ranks

SHORT = timedelta(seconds=0.5)


@pytest.fixture(autouse=True)
def where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_all_ranks_go_on_when_the_last_has_come() -> None:
    store = HashStore()
    first = threading.Thread(target=wait_for_ranks, args=(store, 0, 2, timedelta(seconds=20)))
    first.start()
    wait_for_ranks(store, 1, 2, timedelta(seconds=20))
    first.join(timeout=20)
    assert not first.is_alive()


def test_who_has_not_come_is_named_after_the_timeout() -> None:
    store = HashStore()
    store.set("here/2", "a host")
    store.add("arrived", 1)
    with pytest.raises(SyncError, match=r"rank 0 of 4 waited 0:00:00.5\S* at 127.0.0.1:29999 for rank\(s\) 1, 3; look"):
        wait_for_ranks(store, 0, 4, SHORT)


def test_a_rank_that_stopped_ends_those_that_wait() -> None:
    store = HashStore()
    store.set("failed", json.dumps([3, "node7", "the picture folder x does not exist"]))
    with pytest.raises(ConfigError, match=r"rank 3 \(node7\) stopped, and this rank with it: the picture folder x"):
        wait_for_ranks(store, 0, 4, SHORT)
    assert store.add("told", 0) == 1


def test_nobody_is_told_where_no_launcher_made_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a store was opened")

    monkeypatch.setattr(rendezvous, "open_store", refuse)
    tell_others("it stops")


def test_rank_0_tells_without_torchruns_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under SLURM its own process keeps the store, for as long as the others need to read it."""
    store = HashStore()
    monkeypatch.setattr(rendezvous, "open_store", lambda *_: store)
    monkeypatch.setattr(rendezvous, "SAY_FAREWELL_S", 0.3)
    for name, value in {"RUN_ID": "1", "USE_AGENT_STORE": "False"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    tell_others("it stops")
    rank, _, sentence = json.loads(store.get("failed"))
    assert (rank, sentence) == (0, "it stops")
    with pytest.raises(ConfigError, match="it stops"):
        wait_for_ranks(store, 1, 2, SHORT)


def test_each_store_that_is_opened_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[HashStore] = []

    def make(*_: object, **__: object) -> HashStore:
        stores[:] = stores or [HashStore()]
        return stores[0]

    monkeypatch.setattr(rendezvous, "TCPStore", make)
    first, second = (open_store(0, 2, SHORT) for _ in range(2))
    first.set("key", "old")
    assert not second.check(["key"])
