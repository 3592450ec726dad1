"""Placement of ranks by a ranktable, and its comparison with a launcher's placement. Needs no torch.

Source: HCCL's guide on ranktables (docs/en/user_guide/cluster_info_config of hicann/hccl).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_aigc.cluster.topology import TopologyError


@dataclass(frozen=True)
class RankPlace:
    """Place of one rank in a ranktable."""

    rank: int
    server: str
    device: int
    device_ip: str | None
    super_pod: str | None


def read_ranktable(path: str | Path) -> list[RankPlace]:
    """Read a ranktable of version 1.0 or 1.2, ordered by rank. All its values are strings.

    Raises: TopologyError for a file that is not finished, not complete or not JSON.
    """
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TopologyError(f"the ranktable {path} cannot be read: {error}") from error
    status = table.get("status") if isinstance(table, dict) else None
    if status != "completed":
        raise TopologyError(
            f"the ranktable {path} has status {status!r}, wanted 'completed': the cluster is still writing it; wait"
        )
    if table.get("version") not in ("1.0", "1.2"):
        raise TopologyError(f"the ranktable {path} has version {table.get('version')!r}; 1.0 and 1.2 can be read")
    try:
        places = _places(table)
    except (KeyError, TypeError, ValueError) as error:
        raise TopologyError(f"the ranktable {path} lacks or misspells {error}") from error
    if [place.rank for place in places] != list(range(len(places))) or not places:
        raise TopologyError(
            f"the ranktable {path} has the rank_ids {[place.rank for place in places]}; wanted each of 0 to N-1 once"
        )
    return places


def misplaced(places: Sequence[RankPlace]) -> RankPlace | None:
    """Return the first rank of a ranktable that a launcher, counting node by node, would put on another card.

    HCCL gives each rank the card that its ranktable says, so ranks cannot be reordered under a ranktable.
    """
    servers = {place.server: i for i, place in reversed(list(enumerate(places)))}
    launched = sorted(places, key=lambda place: (servers[place.server], place.device))
    return next((place for place, other in zip(places, launched, strict=True) if place != other), None)


def _places(table: Mapping[str, Any]) -> list[RankPlace]:
    pods = {
        server["server_id"]: pod["super_pod_id"]
        for pod in table.get("super_pod_list", ())
        for server in pod["server_list"]
    }
    places = [
        RankPlace(
            int(device["rank_id"]),
            server["server_id"],
            int(device["device_id"]),
            device.get("device_ip"),
            pods.get(server["server_id"]),
        )
        for server in table["server_list"]
        for device in server["device"]
    ]
    return sorted(places, key=lambda place: place.rank)
