"""Check the variables that ranks meet by: addresses are resolved, ports bound or dialled, interfaces looked up."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping

from lightning_aigc.cli.doctor.host import Findings, Host

DIAL_S = 3.0
"""Seconds that the address of rank 0 may take to answer."""
COUNTS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NNODES", "NPROC_PER_NODE", "OMP_NUM_THREADS")
"""Whole numbers from 1 on."""
INDEXES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
"""Whole numbers from 0 on."""
NUMBERS = (
    "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_BUFFSIZE", "HCCL_RDMA_TIMEOUT", "HCCL_RDMA_RETRY_CNT",
    "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TASK_QUEUE_ENABLE",
)  # fmt: skip
"""Whole numbers from 0 on, of which a library takes any text and then its default."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def check_network(host: Host) -> Findings:
    """Whether ranks of this environment can meet."""
    found = [*_numbers(host.environ), *_interfaces(host.environ), *_meeting(host.environ)]
    return found or [("note", "one machine: MASTER_ADDR and MASTER_PORT are unset, and launchers set them")]


def _numbers(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for names, least in ((COUNTS, 1), (INDEXES, 0), (NUMBERS, 0)):
        for name in names:
            text = environ.get(name)
            values = [] if text is None else text.split(",") if name == "OMP_NUM_THREADS" else [text]
            if any(not value.strip().isdigit() or int(value) < least for value in values):
                yield "problem", f"{name}={text}: wanted a whole number from {least} on; set one, or unset it"
    for index, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("NODE_RANK", "NNODES")):
        place, places = environ.get(index, ""), environ.get(count, "")
        if place.isdigit() and places.isdigit() and int(place) >= int(places) > 0:
            yield "problem", f"{index}={place} with {count}={places}: they count from 0 to {int(places) - 1}"


def _interfaces(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """NCCL and HCCL take prefixes, `=name` for a whole name and `^name` for all others; Gloo takes whole names."""
    here = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        text = environ.get(variable)
        if text is None or text.startswith("^"):
            continue
        is_gloo = variable.startswith(("GLOO", "TP"))
        is_whole = is_gloo or text.startswith("=")
        for wanted in (text if is_gloo else text.removeprefix("=")).split(","):
            if not any(name == wanted if is_whole else name.startswith(wanted) for name in here) or not wanted:
                yield (
                    "problem",
                    f"{variable}={text}: this machine has no interface {wanted or 'without a name'}; it has"
                    f" {', '.join(here)}",
                )


def _meeting(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    address, text = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    port = _port(text)
    if text is not None and port is None:
        yield "problem", f"MASTER_PORT={text}: wanted a port from 1 to 65535, such as 29500"
    if address is None:
        return
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "no valid name"
        yield (
            "problem",
            f"MASTER_ADDR={address} cannot be resolved ({said}); give the name or address of the node of rank 0",
        )
        return
    is_here = _is_here(found[0])
    yield "ok", f"MASTER_ADDR={address} is {', '.join(found)}, {'this machine' if is_here else 'another machine'}"
    nodes = environ.get("NNODES", "")
    if nodes.isdigit() and int(nodes) > 1 and ipaddress.ip_address(found[0].partition("%")[0]).is_loopback:
        yield (
            "problem",
            f"MASTER_ADDR={address} is each node's own loopback, with NNODES={nodes}: give node 0's address",
        )
    node = environ.get("NODE_RANK", environ.get("GROUP_RANK"))
    if node == "0" and not is_here:
        yield (
            "problem",
            f"MASTER_ADDR={address} is another machine, and NODE_RANK=0 is this one, on which rank 0 will listen: give"
            " this node's own address",
        )
    elif port is not None:
        yield _bind(found[0], port) if is_here else _dial(found[0], port)


def _port(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,5}", text) and 0 < int(text) < 65536 else None


def _is_here(address: str) -> bool:
    """Whether an address belongs to this machine: then a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


def _bind(address: str, port: int) -> tuple[str, str]:
    """Rank 0 will listen here: is the port free?"""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
            trial.listen()  # a port that somebody listens on can be bound with SO_REUSEADDR, and not listened on
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "another process listens on it: end it, or choose another" if taken else (error.strerror or error)
            return "problem", f"MASTER_PORT={port} is not free on {address}: {why}"
    return "ok", f"MASTER_PORT={port} is free on this machine, where rank 0 will listen"


def _dial(address: str, port: int) -> tuple[str, str]:
    """Rank 0 listens elsewhere: does it answer?"""
    try:
        with socket.create_connection((address, port), timeout=DIAL_S):
            return "ok", f"{address}:{port} answers"
    except ConnectionRefusedError:
        return "warn", f"{address} is reached, and nothing listens on port {port} yet: start rank 0, then ask once more"
    except OSError as error:
        said = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return (
            "problem",
            f"{address}:{port} is not reached in {DIAL_S:g} s ({said}): look at the route, a firewall, and MASTER_ADDR",
        )
