"""Topology tables as the tools print them, and the order of ranks that follows."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lightning_aigc.cluster.topology import (
    Topology,
    TopologyError,
    device_order,
    node_key,
    nodes_of,
    parse_topology,
    read_topology,
    visible_part,
)

AFFINITY_910B3 = ["144-167", "144-167", "96-119", "96-119", "0-23", "0-23", "48-71", "48-71"]
NPU_LEGEND = """
Legend:

  X    = Self
  SYS  = Path traversing PCIe and NUMA nodes. Nodes are connected through SMP, such as QPI, UPI.
  PHB  = Path traversing PCIe and the PCIe host bridge of a CPU.
  PIX  = Path traversing a single PCIe switch
  HCCS = Connection traversing HCCS.
  SIO  = Path traversing the SIO bus
  HCCS_SW = Connection traversing HCCS through a switch
  NA   = Unknown relationship.
"""
NPU_910B3 = (
    "\t   " + "".join(f"NPU{i}       " for i in range(8)) + "CPU Affinity\n"
    + "".join(
        f"NPU{i}       " + "".join(("X" if i == j else "HCCS").ljust(11) for j in range(8)) + f"{AFFINITY_910B3[i]}\n"
        for i in range(8)
    )
    + NPU_LEGEND
)  # fmt: skip
NPU_A3 = (
    "           Phy-ID12   Phy-ID13   Phy-ID14   Phy-ID15\n"
    "Phy-ID12   X          SIO        HCCS_SW    HCCS_SW\n"
    "Phy-ID13   SIO        X          HCCS_SW    HCCS_SW\n"
    "Phy-ID14   HCCS_SW    HCCS_SW    X          SIO\n"
    "Phy-ID15   HCCS_SW    HCCS_SW    SIO        X\n" + NPU_LEGEND
)
DGX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-55,112-167\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\tNODE\t56-111,168-223\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tPIX\t56-111,168-223\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS\n"
    "NIC1\tSYS\tSYS\tNODE\tPIX\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
PCIE_INTERLEAVED = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tSYS\tPIX\tSYS\t0-31\t0\n"
    "GPU1\tSYS\t X \tSYS\tPHB\t32-63\t1\n"
    "GPU2\tPIX\tSYS\t X \tSYS\t0-31\t0\n"
    "GPU3\tSYS\tPHB\tSYS\t X \t32-63\t1\n"
)
NO_AFFINITY = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tN/A\tN/A\t\tN/A\n"
OLD_NVIDIA = (
    "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tNV2\tPIX\t0-15\nGPU1\tNV2\t X \tSYS\t0-15\nmlx5_0\tPIX\tSYS\t X \n"
)
RUN_TOGETHER = (  # a terminal's copy, its padding lost
    "        GPU0    GPU1    NIC0    NIC1    NIC2    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"
    "GPU0     X      NV18    PIX     NODENODE    0-55    0               N/A\n"
    "GPU1    NV18     X      NODE    NODEPIX     56-111    1               N/A\n"
)


def test_eight_910b3_are_a_full_mesh_with_cores_in_no_order() -> None:
    table = parse_topology(NPU_910B3)
    assert table.devices == tuple(f"NPU{i}" for i in range(8))
    assert table.link("NPU0", "NPU7") == "HCCS" and table.link("NPU3", "NPU3") == "X"
    assert table.cpus[0] == tuple(range(144, 168)) and table.cpus[4] == tuple(range(24))
    assert table.numa == (None,) * 8
    assert device_order(table, 8) == list(range(8))  # all links are equal, whatever the cores


def test_an_a3_names_cards_by_their_physical_id_and_has_no_cores() -> None:
    table = parse_topology(NPU_A3)
    assert table.devices == ("Phy-ID12", "Phy-ID13", "Phy-ID14", "Phy-ID15")
    assert table.link("Phy-ID12", "Phy-ID13") == "SIO" and table.link("Phy-ID13", "Phy-ID14") == "HCCS_SW"
    assert table.cpus == ((),) * 4


def test_network_cards_stand_between_cards_and_cores_and_are_skipped() -> None:
    table = parse_topology(DGX)
    assert table.devices == ("GPU0", "GPU1", "GPU2", "GPU3")
    assert table.link("GPU0", "GPU3") == "NV18"
    assert table.numa == (0, 0, 1, 1)
    assert table.cpus[2] == (*range(56, 112), *range(168, 224))


def test_what_the_tool_does_not_know_is_empty() -> None:
    table = parse_topology(NO_AFFINITY)
    assert (table.devices, table.cpus, table.numa) == (("GPU0",), ((),), (None,))


def test_old_drivers_print_no_numa_columns() -> None:
    table = parse_topology(OLD_NVIDIA)
    assert table.link("GPU0", "GPU1") == "NV2" and table.cpus[1] == tuple(range(16)) and table.numa == (None, None)


def test_cells_that_a_terminal_ran_together_are_parted() -> None:
    table = parse_topology(RUN_TOGETHER)
    assert table.numa == (0, 1) and table.cpus[1] == tuple(range(56, 112))


def test_a_refusal_says_where_to_ask_instead() -> None:
    with pytest.raises(TopologyError, match="outside of the container"):
        parse_topology("This device does not support querying topo.\n")


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed because it couldn't communicate", "GPU0\t X \t0-7\n"])
def test_a_text_without_a_header_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="no line names the cards"):
        parse_topology(text)


def test_a_table_cut_short_names_the_missing_rows() -> None:
    with pytest.raises(TopologyError, match="NPU7, and no row"):
        parse_topology(NPU_910B3[: NPU_910B3.index("NPU7       HCCS")])


def test_a_row_with_too_few_links_is_quoted() -> None:
    with pytest.raises(TopologyError, match="wanted 2 links in the row 'GPU1"):
        parse_topology("\tGPU0\tGPU1\nGPU0\t X \tNV2\nGPU1\tNV2\n")


def test_cards_of_one_numa_node_become_neighbours() -> None:
    assert device_order(parse_topology(PCIE_INTERLEAVED), 4) == [0, 2, 1, 3]


def test_a_numa_node_is_finished_before_a_close_link_leads_out_of_it() -> None:
    links = (("X", "NV4", "PIX"), ("NV4", "X", "SYS"), ("PIX", "SYS", "X"))
    assert device_order(Topology(("GPU0", "GPU1", "GPU2"), links, ((),) * 3, (0, 1, 0)), 3) == [0, 2, 1]


def test_of_two_nvlinks_the_wider_one_is_closer() -> None:
    links = (
        ("X", "NV1", "NV2", "NV1"),
        ("NV1", "X", "NV1", "NV2"),
        ("NV2", "NV1", "X", "NV1"),
        ("NV1", "NV2", "NV1", "X"),
    )
    table = Topology(("GPU0", "GPU1", "GPU2", "GPU3"), links, ((),) * 4, (None,) * 4)
    assert device_order(table, 4) == [0, 2, 1, 3]


def test_paired_dies_stay_together() -> None:
    table = parse_topology(NPU_A3)
    assert device_order(table, 4) == [0, 1, 2, 3]
    interleaved = [["HCCS_SW", "SIO"][abs(i - j) == 2] if i != j else "X" for i in range(4) for j in range(4)]
    links = tuple(tuple(interleaved[4 * i : 4 * i + 4]) for i in range(4))
    assert device_order(Topology(table.devices, links, table.cpus, table.numa), 4) == [0, 2, 1, 3]


def test_more_ranks_than_cards_keep_their_order() -> None:
    assert device_order(parse_topology(PCIE_INTERLEAVED), 5) == [0, 1, 2, 3, 4]


def test_a_part_has_the_links_of_its_own_cards() -> None:
    part = parse_topology(PCIE_INTERLEAVED).part([3, 0, 1])
    assert part.devices == ("GPU3", "GPU0", "GPU1") and part.numa == (1, 0, 1)
    assert device_order(part, 3) == [0, 2, 1]


def test_nodes_come_in_the_order_of_their_first_rank() -> None:
    assert nodes_of(["b", "a", "b", "c", "a"]) == [[0, 2], [1, 4], [3]]


def test_a_process_and_its_child_are_on_one_node_and_another_network_is_another_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = node_key()
    assert here == node_key() and here.startswith(socket.gethostname())
    inode = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116
    assert here.endswith(f"|{inode}")
    monkeypatch.setattr("lightning_aigc.cluster.topology._inode_of", lambda path: str(inode + 1))
    assert node_key() != here


def put_tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_the_tool_on_path_is_asked(only: Path) -> None:
    (only / "table").write_text(NPU_910B3)
    put_tool(only, "npu-smi", f'[ "$*" = "info -t topo" ] && while read -r line; do echo "$line"; done < {only}/table')
    topology, said = read_topology()
    assert topology is not None and len(topology.devices) == 8 and "npu-smi info -t topo" in said


def test_only_the_cards_that_the_process_sees_count(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (only / "table").write_text(PCIE_INTERLEAVED)
    put_tool(only, "nvidia-smi", f'while read -r line; do echo "$line"; done < {only}/table')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    topology, _ = read_topology()
    assert topology is not None
    assert topology.devices == ("GPU3", "GPU1") and topology.links == (("X", "PHB"), ("PHB", "X"))
    assert topology.numa == (1, 1) and topology.cpus[0] == tuple(range(32, 64))


@pytest.mark.parametrize("given", ["GPU-8f6a", "0,4"])
def test_cards_that_cannot_be_told_apart_are_no_topology(given: str) -> None:
    with pytest.raises(TopologyError, match=f"CUDA_VISIBLE_DEVICES={given} does not name cards by numbers below 4"):
        visible_part(parse_topology(PCIE_INTERLEAVED), "CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": given})


def test_without_a_tool_the_reason_is_that(only: Path) -> None:
    topology, said = read_topology()
    assert topology is None and said == "neither npu-smi nor nvidia-smi is on PATH"


def test_a_tool_that_fails_is_quoted(only: Path) -> None:
    put_tool(only, "nvidia-smi", "echo no driver >&2; exit 9")
    topology, said = read_topology()
    assert topology is None and "exit status 9: no driver" in said


def test_a_tool_that_hangs_is_given_up(only: Path) -> None:
    put_tool(only, "npu-smi", "exec /bin/sleep 30")
    topology, said = read_topology(timeout_s=0.3)
    assert topology is None and "timed out" in said
