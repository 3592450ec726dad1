"""Ranktables as clusters write them, whole and not, and whether a launcher would place ranks so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_aigc.cluster.ranktable import RankPlace, misplaced, read_ranktable
from lightning_aigc.cluster.topology import TopologyError, nodes_of


def device(number: int, rank: int, **more: str) -> dict[str, str]:
    return {"device_id": str(number), "device_ip": f"192.168.1.{rank}", "rank_id": str(rank), **more}


def table_1_0() -> dict[str, Any]:
    servers = [
        {"server_id": "node_0", "host_ip": "10.0.0.1", "device": [device(0, 0), device(1, 1)]},
        {"server_id": "node_1", "host_ip": "10.0.0.2", "device": [device(1, 3), device(0, 2)]},
    ]
    return {"version": "1.0", "status": "completed", "server_count": "2", "server_list": servers}


def written(folder: Path, table: object) -> Path:
    path = folder / "hccl.json"
    path.write_text(json.dumps(table))
    return path


def test_a_ranktable_1_0_lists_its_ranks_in_order(tmp_path: Path) -> None:
    places = read_ranktable(written(tmp_path, table_1_0()))
    assert [(p.rank, p.server, p.device, p.device_ip) for p in places] == [
        (0, "node_0", 0, "192.168.1.0"),
        (1, "node_0", 1, "192.168.1.1"),
        (2, "node_1", 0, "192.168.1.2"),
        (3, "node_1", 1, "192.168.1.3"),
    ]
    assert nodes_of([place.server for place in places]) == [[0, 1], [2, 3]]


def test_a_ranktable_1_2_knows_super_pods(tmp_path: Path) -> None:
    table = table_1_0() | {
        "version": "1.2",
        "super_pod_list": [
            {"super_pod_id": "0", "server_list": [{"server_id": "node_0"}]},
            {"super_pod_id": "7", "server_list": [{"server_id": "node_1"}]},
        ],
    }
    assert [place.super_pod for place in read_ranktable(written(tmp_path, table))] == ["0", "0", "7", "7"]


def test_an_unfinished_ranktable_asks_to_wait(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"status 'initializing', wanted 'completed'.*wait"):
        read_ranktable(written(tmp_path, {"status": "initializing"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "2.0"}, "version '2.0'"),
        ({"server_list": [{"server_id": "a", "device": [{"device_id": "0"}]}]}, "'rank_id'"),
        ({"server_list": [{"server_id": "a", "device": [device(0, 1)]}]}, r"rank_ids \[1\]"),
        ({"server_list": []}, "wanted each of 0 to N-1 once"),
    ],
)
def test_a_ranktable_that_is_not_whole_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        read_ranktable(written(tmp_path, table_1_0() | change))


def test_a_missing_ranktable_is_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"gone\.json cannot be read"):
        read_ranktable(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("cards", "rank"),
    [
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], None),
        ([("b", 4), ("b", 6), ("a", 0), ("a", 1)], None),
        ([("a", 1), ("a", 0), ("b", 0), ("b", 1)], 0),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], 1),
    ],
)
def test_a_ranktable_that_a_launcher_does_not_follow_is_known_by_its_first_rank(
    cards: list[tuple[str, int]], rank: int | None
) -> None:
    places = [RankPlace(number, server, card, None, None) for number, (server, card) in enumerate(cards)]
    found = misplaced(places)
    assert (found.rank if found else None) == rank
