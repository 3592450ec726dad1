"""`lightning doctor` on the variables that ranks meet by: what cannot work is a problem with its remedy."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from fakes.processes.network import enter, two_hosts
from lightning_aigc.cli.doctor.host import Host
from lightning_aigc.cli.doctor.network import check_network


def found(**environ: str) -> list[tuple[str, str]]:
    return check_network(Host(environ))


def problems(**environ: str) -> list[str]:
    return [text for mark, text in found(**environ) if mark == "problem"]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_single_machine_has_no_problem(free_port: int) -> None:
    assert [mark for mark, _ in found()] == ["note"]
    assert {mark for mark, _ in found(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))} == {"ok"}
    lo = socket.if_nameindex()[0][1]
    assert problems(GLOO_SOCKET_IFNAME=lo, NCCL_SOCKET_IFNAME=f"={lo}", HCCL_SOCKET_IFNAME="^docker") == []
    assert problems(RANK="1", WORLD_SIZE="2", OMP_NUM_THREADS="4,2", HCCL_CONNECT_TIMEOUT="120") == []


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR=no-such-host.invalid cannot be resolved"),
        ({"MASTER_ADDR": "a" * 70 + ".x"}, "cannot be resolved"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: wanted a port from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: wanted a port"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http: wanted a port"),
        ({"GLOO_SOCKET_IFNAME": "eth99"}, "GLOO_SOCKET_IFNAME=eth99: this machine has no interface eth99; it has lo"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth99"}, "has no interface eth99"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "NCCL_SOCKET_IFNAME==l: this machine has no interface l"),
        ({"HCCL_SOCKET_IFNAME": ""}, "has no interface without a name"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: wanted a whole number from 1 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: wanted a whole number from 1 on"),
        ({"RANK": "-1"}, "RANK=-1: wanted a whole number from 0 on"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2: they count from 0 to 1"),
        ({"NODE_RANK": "3", "NNODES": "3"}, "NODE_RANK=3 with NNODES=3"),
        ({"OMP_NUM_THREADS": "four"}, "OMP_NUM_THREADS=four: wanted a whole number"),
        ({"HCCL_CONNECT_TIMEOUT": "2min"}, "HCCL_CONNECT_TIMEOUT=2min: wanted a whole number"),
        (
            {"MASTER_ADDR": "localhost", "NNODES": "2"},
            "is each node's own loopback, with NNODES=2: give node 0's address",
        ),
    ],
)
def test_what_cannot_work_is_a_problem(environ: dict[str, str], said: str) -> None:
    [text] = problems(**environ)
    assert said in text


def test_a_port_that_is_taken_is_a_problem(taken_port: int) -> None:
    [text] = problems(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken_port))
    assert f"MASTER_PORT={taken_port} is not free on 127.0.0.1: another process listens on it" in text


@pytest.mark.usefixtures("needs_namespaces")
def test_another_node_is_dialled() -> None:
    with two_hosts("1gbit") as link:
        reader, writer = os.pipe()
        ready, go = os.pipe()
        listening = os.fork()
        if listening == 0:
            enter(link.hosts[0])
            with socket.create_server((link.addresses[0], 29511)):
                os.write(go, b"x")
                os.read(reader, 1)
            os._exit(0)
        os.read(ready, 1)
        asking = os.fork()
        if asking == 0:
            enter(link.hosts[1])
            address = link.addresses[0]
            heard = found(MASTER_ADDR=address, MASTER_PORT="29511")[-1]
            quiet = found(MASTER_ADDR=address, MASTER_PORT="29512")[-1]
            link.cut()
            lost = found(MASTER_ADDR=address, MASTER_PORT="29511")[-1]
            marks = [heard[0], quiet[0], lost[0]]
            os._exit(0 if marks == ["ok", "warn", "problem"] and "start rank 0" in quiet[1] else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(asking, 0)[1])
        os.write(writer, b"x")
        os.waitpid(listening, 0)
        assert status == 0


def test_the_node_of_rank_0_has_the_address_of_rank_0() -> None:
    [text] = problems(MASTER_ADDR="192.0.2.1", MASTER_PORT="29511", NODE_RANK="0")  # an address of documentation
    assert "MASTER_ADDR=192.0.2.1 is another machine, and NODE_RANK=0 is this one" in text
    assert problems(MASTER_ADDR="127.0.0.1", NODE_RANK="0") == []


def test_gloo_takes_an_interface_s_name_without_a_sign() -> None:
    [text] = problems(GLOO_SOCKET_IFNAME="=lo")
    assert "this machine has no interface =lo; it has" in text
    assert problems(NCCL_SOCKET_IFNAME="=lo") == problems(GLOO_SOCKET_IFNAME="lo") == []
