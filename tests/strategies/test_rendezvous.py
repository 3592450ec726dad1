"""Ranks that meet before the process group: who is missing is named, and a rank that stops says why."""

from __future__ import annotations

import json
import threading
import time
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
    monkeypatch.setattr(rendezvous, "_stopped_at", None)


def test_all_ranks_go_on_when_the_last_has_come() -> None:
    store = HashStore()
    first = threading.Thread(target=wait_for_ranks, args=(store, 0, 2, timedelta(seconds=20), "npu_sparse"))
    first.start()
    wait_for_ranks(store, 1, 2, timedelta(seconds=20), "npu_sparse")
    first.join(timeout=20)
    assert not first.is_alive()


def test_who_has_not_come_is_named_after_the_timeout() -> None:
    store = HashStore()
    store.set("here/2", "a host")
    store.add("arrived", 1)
    with pytest.raises(SyncError, match=r"rank 0 of 4 waited 0:00:00.5\S* at 127.0.0.1:29999 for rank\(s\) 1, 3; look"):
        wait_for_ranks(store, 0, 4, SHORT, "npu_sparse")


def test_a_rank_that_stopped_ends_those_that_wait() -> None:
    store = HashStore()
    store.set("failed", json.dumps([3, "node7", "the picture folder x does not exist"]))
    with pytest.raises(ConfigError, match=r"rank 3 \(node7\) stopped, and this rank with it: the picture folder x"):
        wait_for_ranks(store, 0, 4, SHORT, "npu_sparse")
    assert store.add("told", 0) == 1


def test_a_node_with_another_strategy_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    store, said = HashStore(), []
    monkeypatch.setattr(rendezvous, "SAY_FAREWELL_S", 5.0)

    def meet(rank: int, strategy: str) -> None:
        with pytest.raises(ConfigError) as stopped:
            wait_for_ranks(store, rank, 2, timedelta(seconds=20), strategy)
        said.append(str(stopped.value))

    first = threading.Thread(target=meet, args=(0, "npu_sparse"))
    first.start()
    while not store.check(["strategy"]):
        time.sleep(0.01)
    meet(1, "ddp")
    first.join(timeout=20)
    assert all("rank 1 (" in each and ") runs trainer.strategy ddp, and rank 0 (" in each for each in said)
    assert len(said) == 2 and ") npu_sparse; give every node the same command" in said[0]


def test_a_rank_prints_what_the_first_of_its_node_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(rendezvous, "open_store", lambda *_: store)
    monkeypatch.setattr(rendezvous, "SAY_FAREWELL_S", 0.2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")

    def stops(rank: int, sentence: str) -> bool:
        for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        return tell_others(sentence)

    assert not stops(0, "the folder has results")
    assert stops(1, "the folder has results") and not stops(1, "the card is busy")


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
        wait_for_ranks(store, 1, 2, SHORT, "npu_sparse")


def test_each_store_that_is_opened_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[HashStore] = []

    def make(*_: object, **__: object) -> HashStore:
        stores[:] = stores or [HashStore()]
        return stores[0]

    monkeypatch.setattr(rendezvous, "TCPStore", make)
    first, second = (open_store(0, 2, SHORT) for _ in range(2))
    first.set("key", "old")
    assert not second.check(["key"])
