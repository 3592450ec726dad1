"""Topology of cards: tables of links, nodes, and the order of ranks by links. Needs no torch.

Sources: `npu-smi info -t topo` as ms-swift's NPU guide prints it, and `nvidia-smi topo -m` as its own Legend explains
it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_aigc.errors import UserError

TOOLS = {"npu-smi": ("npu-smi", "info", "-t", "topo"), "nvidia-smi": ("nvidia-smi", "topo", "-m")}
VISIBLE = {"npu-smi": "ASCEND_RT_VISIBLE_DEVICES", "nvidia-smi": "CUDA_VISIBLE_DEVICES"}
"""The variables that hide cards from a process, but not from the tools."""
REFUSAL = "This device does not support querying topo"
CLOSENESS = ("SIO", "HCCS", "NV", "HCCS_SW", "PIX", "PIB", "PXB", "PHB", "NODE", "SYS")
"""Links from the closest to the farthest; a link that is in no Legend counts as farther than all of these."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header, even in a pipe
_DEVICE = re.compile(r"(?:GPU|NPU|Phy-ID)\d+")
_COLUMN = re.compile(r"CPU Affinity|NUMA Affinity|GPU NUMA ID|\S+")
_CELL = re.compile(r"NV\d+|HCCS_SW|HCCS|SIO|PIX|PIB|PXB|PHB|NODE|SYS|N/A|NA|X")
_CELLS = re.compile(f"(?:{_CELL.pattern})+")


class TopologyError(UserError):
    """A topology table or a ranktable that cannot be read."""


@dataclass(frozen=True)
class Topology:
    """Cards of one node and their links, as its tool reports them."""

    devices: tuple[str, ...]
    """Their names in the tool's order: NPU0, GPU3, Phy-ID12."""
    links: tuple[tuple[str, ...], ...]
    """links[i][j]: how card i reaches card j, in the tool's words; X is the card itself."""
    cpus: tuple[tuple[int, ...], ...]
    """CPU cores near each card; empty where the tool does not say."""
    numa: tuple[int | None, ...]
    """NUMA node of each card; None where the tool does not say."""

    def link(self, first: str, second: str) -> str:
        """Return how two cards reach each other. Raises: ValueError for a name that is not in `devices`."""
        return self.links[self.devices.index(first)][self.devices.index(second)]

    def part(self, places: Sequence[int]) -> Topology:
        """Return only the cards at these places, in this order. Raises: IndexError for a place that is not there."""
        return Topology(
            tuple(self.devices[i] for i in places),
            tuple(tuple(self.links[i][j] for j in places) for i in places),
            tuple(self.cpus[i] for i in places),
            tuple(self.numa[i] for i in places),
        )


class Reading(NamedTuple):
    """A topology, or why there is none."""

    topology: Topology | None
    said: str


def parse_topology(text: str) -> Topology:
    """Read the table of `npu-smi info -t topo` or `nvidia-smi topo -m`.

    Columns are found by the header's names: the tables differ in what stands between and behind the cards.
    Raises: TopologyError when the tool refused, or the text is no such table.
    """
    if REFUSAL in text:
        raise TopologyError(f"the driver says: {REFUSAL}; ask on the host, outside of the container")
    lines = [line for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    header_at = next((i for i, line in enumerate(lines) if _is_header(line)), None)
    if header_at is None:
        raise TopologyError(
            f"no line names the cards (NPU0 or GPU0 and on), got {_shortened(text)!r}; wanted what"
            " `npu-smi info -t topo` or `nvidia-smi topo -m` prints"
        )
    columns = _COLUMN.findall(lines[header_at])
    devices = tuple(column for column in columns if _DEVICE.fullmatch(column))
    rows: dict[str, dict[str, str]] = {}
    for line in lines[header_at + 1 :]:
        label, *cells = line.split()
        if label in devices:
            rows[label] = _named_cells(columns, cells, line)
    if missing := [device for device in devices if device not in rows]:
        raise TopologyError(f"the header names {', '.join(missing)}, and no row begins so; pass the complete table")
    return Topology(
        devices,
        tuple(tuple(rows[source][target] for target in devices) for source in devices),
        tuple(_core_list(rows[device].get("CPU Affinity", "N/A")) for device in devices),
        tuple(_whole_number(rows[device].get("NUMA Affinity", "N/A")) for device in devices),
    )


def read_topology(timeout_s: float = 20) -> Reading:
    """Ask the tool on PATH for the cards that this process sees; a topology of None comes with the reason."""
    tool = next((name for name in TOOLS if shutil.which(name)), None)
    if tool is None:
        return Reading(None, f"neither {' nor '.join(TOOLS)} is on PATH")
    command = " ".join(TOOLS[tool])
    try:
        done = subprocess.run(TOOLS[tool], capture_output=True, text=True, timeout=timeout_s, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Reading(None, f"`{command}` did not answer: {error}")
    try:
        return Reading(visible_part(parse_topology(done.stdout), VISIBLE[tool], os.environ), f"`{command}`")
    except TopologyError as error:
        status = f" and exit status {done.returncode}: {_shortened(done.stderr)}" if done.returncode else ""
        return Reading(None, f"`{command}`: {error}{status}")


def visible_part(topology: Topology, variable: str, environ: Mapping[str, str]) -> Topology:
    """Return the cards that a variable such as CUDA_VISIBLE_DEVICES leaves, in its order; all when it is unset.

    Raises: TopologyError when it names cards by anything but their place in the table.
    """
    given = environ.get(variable)
    if given is None:
        return topology
    places = [part.strip() for part in given.split(",") if part.strip()]
    if not all(place.isdigit() and int(place) < len(topology.devices) for place in places):
        raise TopologyError(
            f"{variable}={given} does not name cards by numbers below {len(topology.devices)}, so theirs are unknown"
        )
    return topology.part([int(place) for place in places])


def node_key() -> str:
    """Return a key of this process's node, equal for two processes that reach each other without a network.

    It has host name, boot and network namespace: two containers of a host count as two nodes, because what they send
    each other goes through the network stack.
    """
    return "|".join(
        (
            socket.gethostname(),
            _text_of("/proc/sys/kernel/random/boot_id"),
            _inode_of("/proc/self/ns/net"),
        )
    )


def nodes_of(keys: Sequence[str]) -> list[list[int]]:
    """Group ranks by their node's key, nodes in the order of their first rank."""
    nodes: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        nodes.setdefault(key, []).append(rank)
    return list(nodes.values())


def device_order(topology: Topology | None, count: int) -> list[int]:
    """Return the first `count` cards of a node, each followed by the closest remaining card.

    Without a topology, with more ranks than cards, or where all links are equal the cards keep their order.
    """
    if topology is None or not 0 < count <= len(topology.devices):
        return list(range(count))
    links = {topology.links[i][j] for i in range(count) for j in range(count) if i != j}
    if len(links) <= 1:
        return list(range(count))
    place: list[Hashable] = [
        topology.cpus[i] if topology.numa[i] is None else topology.numa[i] for i in range(len(topology.devices))
    ]
    order, left = [0], list(range(1, count))
    while left:
        last = order[-1]
        nearest = min(left, key=lambda i: (place[i] != place[last], distance(topology.links[last][i]), i))
        order.append(nearest)
        left.remove(nearest)
    return order


def distance(link: str) -> tuple[int, int]:
    """Return a key that sorts links from close to far; of two NVLinks the wider is closer."""
    bonded = re.fullmatch(r"NV(\d+)", link)
    name = "NV" if bonded else link
    return (CLOSENESS.index(name) if name in CLOSENESS else len(CLOSENESS), -int(bonded[1]) if bonded else 0)


def _is_header(line: str) -> bool:
    names = _COLUMN.findall(line)
    return bool(names and _DEVICE.fullmatch(names[0]) and (len(names) == 1 or not _CELL.fullmatch(names[1])))


def _named_cells(columns: Sequence[str], cells: list[str], line: str) -> dict[str, str]:
    devices = sum(_DEVICE.fullmatch(column) is not None for column in columns)
    # Copied terminals run padded cells together: NODENODE is two.
    cells = [part for cell in cells for part in (_CELL.findall(cell) if _CELLS.fullmatch(cell) else [cell])]
    if len(cells) < devices:
        raise TopologyError(f"wanted {devices} links in the row {line.strip()!r}, got {len(cells)}")
    return dict(zip(columns, cells, strict=False))


def _core_list(text: str) -> tuple[int, ...]:
    """Cores of "0-3,8-11"; none for N/A."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            return ()
        cores.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(cores)


def _whole_number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _inode_of(path: str) -> str:
    try:
        return str(os.stat(path).st_ino)  # noqa: PTH116  a magic link of /proc, not a file
    except OSError:
        return ""


def _shortened(text: str, length: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"
