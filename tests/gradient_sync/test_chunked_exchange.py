"""Exchanges in pieces: what the collectives give, which links take them, and what a lost rank does to them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fakes.processes import network
from fakes.processes.given_gradients import Given, Training, make_gradients
from fakes.processes.ranks import run_ranks
from lightning_aigc.gradient_sync.transport import chunked_exchange
from lightning_aigc.gradient_sync.transport.chunked_exchange import ChunkedExchanges, chunked_where_slow
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups

SHAPES = {"first": (64, 384), "second": (512, 384), "bias": (384,)}


def exchange(rank: int, dtype: torch.dtype) -> None:
    group = dist.group.WORLD
    chunked, size = ChunkedExchanges(group), dist.get_world_size()
    chunked_exchange.CHUNK_BYTES = 1000  # does not divide a row
    row = torch.arange(3_333 * size).to(dtype) + rank
    own = row[:3_333].clone()
    # Two of each are on the way at a time, as units of gradients are.
    results = [(torch.empty_like(row), torch.empty_like(row)) for _ in range(2)]
    for all_to_all, all_gather in results:
        waiting = chunked.all_to_all(all_to_all, row), chunked.all_gather(all_gather, own)
    for each in waiting:
        each.wait()
    wanted = torch.empty_like(row), torch.empty_like(row)
    dist.all_to_all_single(wanted[0], row)
    dist.all_gather_into_tensor(wanted[1], own)
    for found in results:
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    chunked.close()


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.uint8), (3, torch.float32)])
def test_pieces_make_what_the_collectives_make(ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    run_ranks(exchange, ranks, tmp_path, dtype)


def parameters_after(rank: int, pieces: bool, options: dict[str, Any]) -> tuple[torch.Tensor, bool]:
    chunked_exchange.SLOW_BPS = 1e15 if pieces else 1.0
    chunked_exchange.UNSPLIT_BYTES = chunked_exchange.CHUNK_BYTES = 4096
    run = Training({"bucket_cap_mb": 0.3}, module=Given(SHAPES), bucket_mb=0.3, **options)
    for number in range(3):
        run.step(make_gradients(number, rank, SHAPES))
    sync = run.compressor._sync
    assert sync is not None
    chunked = sync.groups.between.chunked != []
    run.compressor.close()
    return run.flat(), chunked


def test_a_training_in_pieces_is_the_same_to_the_bit(tmp_path: Path) -> None:
    whole = run_ranks(parameters_after, 2, tmp_path / "whole", False, {"mode": "int3"})
    pieces = run_ranks(parameters_after, 2, tmp_path / "pieces", True, {"mode": "int3"})
    assert [chunked for _, chunked in whole] == [False, False] and [chunked for _, chunked in pieces] == [True, True]
    assert all(torch.equal(found, whole[0][0]) for found, _ in (*whole, *pieces))


EXCHANGES = [
    *[({"mode": mode}, True) for mode in ("int8", "ternary", "sparse")],
    *[({"mode": mode}, False) for mode in ("dense", "bf16")],
    ({"mode": "local", "local_steps": 1}, False),
    ({"mode": "local", "local_steps": 1, "average": "int3"}, True),
]


def are_chunked(rank: int) -> list[bool]:
    return [parameters_after(rank, True, options)[1] for options, _ in EXCHANGES]


def test_only_modes_that_exchange_rows_measure_the_link(tmp_path: Path) -> None:
    assert run_ranks(are_chunked, 2, tmp_path) == [[exchanges for _, exchanges in EXCHANGES]] * 2


def lose_a_rank(rank: int) -> str | None:
    chunked = ChunkedExchanges(dist.group.WORLD)
    row = torch.zeros(2, 4 << 20, dtype=torch.uint8)
    if rank == 1:
        os._exit(1)
    try:
        chunked.all_to_all(torch.empty_like(row).view(-1), row.view(-1)).wait()
    except RuntimeError as error:
        return str(error)
    return None


def test_a_rank_that_died_ends_the_wait(tmp_path: Path) -> None:
    said = run_ranks(lose_a_rank, 2, tmp_path, may_die=[1])[0]
    assert said


def is_chunked(rank: int) -> bool:
    groups = ProcessGroups("auto")
    groups.chunk_on_slow_links()
    found = groups.between.chunked != []
    groups.destroy()
    return found


@pytest.mark.skipif(network.why_no_namespaces() is not None, reason=str(network.why_no_namespaces()))
def test_a_slow_link_takes_pieces(tmp_path: Path) -> None:
    with network.two_hosts("100mbit") as link:
        assert run_ranks(is_chunked, 2, tmp_path, hosts=link.hosts) == [True, True]


def is_chunked_below(rank: int, bytes_a_second: float) -> bool:
    chunked_exchange.SLOW_BPS = bytes_a_second
    return chunked_where_slow(dist.group.WORLD) is not None


def test_a_link_above_the_limit_takes_none(tmp_path: Path) -> None:
    assert run_ranks(is_chunked_below, 2, tmp_path, 1e5) == [False, False]  # loopback has more on any machine
