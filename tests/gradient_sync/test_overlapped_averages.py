"""Mode local with overlap_average: what the parameters are while an average travels, when it lands, and at the end."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.processes.given_gradients import Training, make_round_gradients
from fakes.processes.ranks import run_ranks
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.options import SyncOptions

LATE_S = 0.6
OVERLAPPED: dict[str, Any] = {"mode": "local", "local_steps": 4, "overlap_average": True}


def moved(steps: range, ranks: tuple[int, ...]) -> Tensor:
    """Update of SGD at a rate of 1 with the mean of these ranks' gradients: their eighths add up exactly."""
    gradients = [[make_round_gradients(step, rank) for rank in ranks] for step in steps]
    mean = [sum(torch.cat([g.reshape(-1) for g in of_rank.values()]) for of_rank in s) / len(ranks) for s in gradients]
    return -sum(mean, torch.zeros(()))


def work(rank: int) -> dict[str, Any]:
    run = Training(**OVERLAPPED)
    after = run.steps(rank, range(11), make_round_gradients)
    sync = run.compressor._sync
    assert sync is not None
    sync.average_parameters()  # as at the end of a training: the one that is on its way, and what came after it
    ended = run.flat()
    blocking = Training(mode="local", local_steps=4)
    blocking.steps(rank, range(8), make_round_gradients)
    waits = {}
    for overlap in (True, False):
        late = Training(**OVERLAPPED | {"average": "top_k", "overlap_average": overlap})
        if rank == 1:  # reaches its average later than rank 0
            late.optimizer.register_step_pre_hook(lambda *_, run=late: time.sleep(LATE_S * is_due(run)))
        late.steps(rank, range(4), make_round_gradients)
        report = late.compressor.last_step
        assert report is not None
        waits[overlap] = report.exposed_ms / 1e3
        assert report.sent_bytes["values"] > 0  # it has left
    sent = [r.compressor._sync.groups.traffic.sent["values"] for r in (run, blocking)]
    return {"after": after, "ended": ended, "sent": sent, "waits": waits}


def is_due(run: Training) -> bool:
    return bool(run.compressor._sync.step == OVERLAPPED["local_steps"] - 1)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    found: list[Any] = run_ranks(work, 2, tmp_path_factory.mktemp("ranks"))
    return found


def test_a_rank_keeps_its_own_steps_when_the_average_lands_two_steps_later(ranks: list[Any]) -> None:
    for rank, found in enumerate(ranks):
        alone = [moved(range(n), (rank,)) for n in (4, 5)]
        assert torch.equal(found["after"][3], alone[0]) and torch.equal(found["after"][4], alone[1])
        assert torch.equal(found["after"][5], moved(range(4), (0, 1)) + moved(range(4, 6), (rank,)))
        assert torch.equal(found["after"][9], moved(range(8), (0, 1)) + moved(range(8, 10), (rank,)))


def test_at_the_end_all_ranks_are_where_the_mean_gradient_leads(ranks: list[Any]) -> None:
    for found in ranks:
        assert torch.equal(found["ended"], moved(range(11), (0, 1)))


def test_an_average_costs_the_same_bytes_as_one_that_is_waited_for(ranks: list[Any]) -> None:
    overlapped, blocking = ranks[0]["sent"]
    assert overlapped * 2 == blocking * 3  # two on their way and one at the end, against two


def test_a_rank_steps_on_while_the_average_waits_for_a_late_one(ranks: list[Any]) -> None:
    waits = ranks[0]["waits"]
    assert waits[False] > LATE_S / 2 > waits[True]


def test_fewer_local_steps_than_an_average_needs_are_refused() -> None:
    with pytest.raises(ConfigError, match="local_steps must be at least 3; got 2"):
        SyncOptions(mode="local", local_steps=2, overlap_average=True)
