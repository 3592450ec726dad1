"""Hosts on one machine: network namespaces joined by a link that can be cut, and connections that lose packets.

Namespaces need root and iproute2. Lost packets need neither: a filter on the receiving socket drops them before TCP
sees them, so that TCP has to send them again. (tc's netem does the same for a device, and many kernels lack it.)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import socket
import stat
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

DEVICE = "wire"
CLONE_NEWNET, SO_ATTACH_FILTER = 0x40000000, 26
TCP_INFO_RETRANSMITS = 100
"""Offset of `tcpi_total_retrans` in the kernel's `struct tcp_info`."""


@functools.cache
def why_no_namespaces() -> str | None:
    """Reason why this machine cannot make network namespaces with a slow link; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need iproute2: {' and '.join(missing)} missing"
    try:
        with two_hosts("100mbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: `{' '.join(error.cmd)}` says {error.stderr.strip()}"


class Link:
    """The link between two hosts."""

    def __init__(self, hosts: tuple[str, str], addresses: tuple[str, str]) -> None:
        self.hosts, self.addresses = hosts, addresses

    def cut(self) -> None:
        """Pull the cable: neither host hears the other, and no connection is closed."""
        cut(self.hosts[0])

    def mend(self) -> None:
        mend(self.hosts[0])


def cut(host: str) -> None:
    _run("ip", "-n", host, "link", "set", DEVICE, "down")


def mend(host: str) -> None:
    _run("ip", "-n", host, "link", "set", DEVICE, "up")


@contextlib.contextmanager
def two_hosts(rate: str, burst: str = "256kb") -> Iterator[Link]:
    """Two namespaces, joined by a link until the block ends.

    Args: rate: of each direction, as tc writes it.
        burst: bytes that an idle link lets pass at once, as tc writes them.
    """
    id_ = f"test{os.getpid()}-{threading.get_native_id()}"
    hosts, addresses = (f"{id_}-a", f"{id_}-b"), ("10.211.9.1", "10.211.9.2")
    try:
        for host in hosts:
            _run("ip", "netns", "add", host)
        _run("ip", "link", "add", DEVICE, "netns", hosts[0], "type", "veth", "peer", "name", DEVICE, "netns", hosts[1])
        for host, address in zip(hosts, addresses, strict=True):
            _run("ip", "-n", host, "address", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", host, "link", "set", DEVICE, "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            shape = f"tc -n {host} qdisc add dev {DEVICE} root tbf rate {rate} burst {burst} latency 50ms"
            _run(*shape.split())
        yield Link(hosts, addresses)
    finally:
        for host in hosts:
            subprocess.run(("ip", "netns", "delete", host), check=False, capture_output=True)


def enter(host: str) -> None:
    """Move this process to a host; threads that run already stay where they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", host).open(encoding="utf-8") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {host}")


def lose_packets(share: float) -> int:
    """Drop this share of what arrives on the TCP connections that this process has; returns how many it has."""
    load, jump_if_at_least, give_back = 0x20, 0x35, 0x06  # classic BPF: random number, compare, bytes to keep
    instructions = [
        (load, 0, 0, 0xFFFFF000 + 56),
        (jump_if_at_least, 0, 1, int(share * 2**32)),
        (give_back, 0, 0, 0xFFFFFFFF),
        (give_back, 0, 0, 0),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = struct.pack("HL", len(instructions), ctypes.addressof(code))
    connections = 0
    for connection in _connections():
        connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        connections += 1
    return connections


def bytes_sent() -> int:
    """Bytes that this process's host has put on the link."""
    lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()
    counts = dict(line.split(":", 1) for line in lines if ":" in line)
    return int({name.strip(): values for name, values in counts.items()}[DEVICE].split()[8])


def packets_sent_again() -> Counter[object]:
    """Number of TCP's repeated packets, by connection of this process: some close while others are opened."""
    found: Counter[object] = Counter()
    for connection in _connections():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        ends = connection.getsockname(), connection.getpeername()
        found[ends] = struct.unpack_from("I", info, TCP_INFO_RETRANSMITS)[0]
    return found


def _connections() -> Iterator[socket.socket]:
    """The TCP connections of this process, each as a second handle that is closed after use."""
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208  a Path per name tells less
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # closed meanwhile
            continue
        with connection, contextlib.suppress(OSError):
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # a socket that listens has none
                yield connection


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
