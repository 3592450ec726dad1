"""Step time of gradient sync between two hosts over a slow link, compared with plain DDP in the same run.

Two network namespaces joined by a token-bucket link simulate the hosts, with one single-threaded process each; both are
removed at the end. Needs root and iproute2. The task is full fine-tuning of a U-Net of 58 M parameters on 8x8 latents:
little compute and many bytes, the worst case for a slow link; or, with `--network linear`, of 50 M parameters in linear
layers, whose backward pass is so short that it hides nothing. `default` is npu_sparse's default with its protected
layers; a mode by name protects nothing. `--fused-adam` takes torch's fused AdamW on all sides. `--rate loopback` omits
the namespaces, `--rate alone` also the second process.

    python -m benchmarks.gradient_sync.two_hosts [--rate 1gbit] [--network unet] [--steps 7]
        [--variants plain default ...] [--fused-adam] [--output FILE]

Medians of a step's parts: `forward_ms`, `backward_ms` until the last gradient is ready, `exposed_ms` from there until
all sums are ready, `optimizer_ms`; in addition `packing_ms`, the CPU time of the sync's thread, and `waiting_ms`, the
time that this thread waited for the network. Plain DDP's backward includes its sync.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.rows import keep_row

DEVICE = "aigc0"
RUN = os.environ.setdefault("TWO_HOSTS_RUN", str(os.getpid()))
"""Id of the process that creates the namespaces; its child processes inherit it."""
HOSTS = ((f"aigc-a-{RUN}", "10.211.7.1"), (f"aigc-b-{RUN}", "10.211.7.2"))
"""Namespaces, named by run so that two runs do not delete each other's, and their addresses."""
WITHOUT_LINK = {"loopback": 2, "alone": 1}
NETWORKS = ("unet", "linear")
VARIANTS = (
    "plain",
    "bf16_hook",
    "powersgd_hook",
    "default",
    "int3",
    "int8",
    "int4",
    "sparse",
    "sparse_int8",
    "auto",
)


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Two network namespaces, joined by a link of this rate in each direction until the block ends."""

    def ip(*words: str) -> None:
        subprocess.run(("ip", *words), check=True, capture_output=True, text=True)

    names = [name for name, _ in HOSTS]
    for name in (path.name for path in Path("/run/netns").glob("aigc-[ab]-*")):  # left over from a killed run
        if not Path("/proc", name.rpartition("-")[2]).exists():
            ip("netns", "delete", name)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for name, address in HOSTS:
            ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
            ip("-n", name, "link", "set", "lo", "up")
            shape = f"tc -n {name} qdisc add dev {DEVICE} root tbf rate {rate} burst 256kb latency 50ms"
            subprocess.run(shape.split(), check=True, capture_output=True, text=True)
        yield
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "delete", name), check=False, capture_output=True)


def enter(host: str) -> None:
    """Move this process to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", host).open(encoding="utf-8") as namespace:
        if libc.setns(namespace.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")


def run_rank(rank: int, options: argparse.Namespace) -> None:
    """Measure every variant on this rank, print and write the rows on rank 0, and end the process."""
    from benchmarks.gradient_sync.two_hosts_networks import make_network

    task = make_network(options.network)

    import torch
    import torch.distributed as dist

    from benchmarks.gradient_sync.two_hosts_variants import TIMEOUT, measure

    torch.set_num_threads(1)
    address, ranks = HOSTS[0][1], 2
    if options.rate in WITHOUT_LINK:
        address, ranks = "127.0.0.1", WITHOUT_LINK[options.rate]
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    dist.init_process_group("gloo", f"tcp://{address}:29571", rank=rank, world_size=ranks, timeout=TIMEOUT)
    start_weights = {name: p.detach().clone() for name, p in task.module.state_dict().items()}
    generator = torch.Generator().manual_seed(rank)

    rows = []
    # Plain DDP at the beginning and at the end shows how the machine's speed changed.
    order = [*options.variants, "plain"] if options.variants[0] == "plain" else ["plain", *options.variants, "plain"]
    for variant in order:
        task.module.load_state_dict(start_weights)
        found = measure(variant, task, generator, options.steps, options.fused_adam)
        rows.append({"variant": variant, **found})
        if rank == 0:
            print(variant, json.dumps({k: v for k, v in found.items() if k != "times"}), flush=True)
    if rank == 0:
        about = {
            "benchmark": "two_hosts", "rate": options.rate, "ranks": ranks,
            "network": options.network, "parameters": sum(p.numel() for p in task.module.parameters()),
            "device": "cpu", "threads": 1, "torch": torch.__version__, "steps": options.steps,
            "optimizer": "AdamW, fused" if options.fused_adam else "AdamW",
        }  # fmt: skip
        write_rows(rows, about, options.output)
    dist.barrier()
    os._exit(0)  # does not wait for process groups of earlier variants


def write_rows(rows: list[dict[str, Any]], about: dict[str, Any], output: Path | None) -> None:
    """Print each variant's row, with its ratio to plain DDP, and append it to `output`."""
    plain = statistics.median(t for row in rows if row["variant"] == "plain" for t in row["times"])
    for row in rows:
        times = row.pop("times")
        entry = {
            **about, **row,
            "step_time_spread_s": [round(min(times), 3), round(max(times), 3)],
            "step_time_ratio": round(row["step_time_s"] / plain, 3),
        }  # fmt: skip
        entry = {key: round(value, 4) if isinstance(value, float) else value for key, value in entry.items()}
        keep_row(entry, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--network", default="unet", choices=NETWORKS)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--fused-adam", action="store_true", help="torch's fused AdamW, in every variant")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options)
    hosts = two_hosts(options.rate) if options.rate not in WITHOUT_LINK else contextlib.nullcontext()
    with hosts:
        words = [sys.executable, "-m", "benchmarks.gradient_sync.two_hosts", *sys.argv[1:]]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*before, *words, "--rank", str(rank)], env=environment)
            for rank, before in enumerate(
                [()] * WITHOUT_LINK[options.rate]
                if options.rate in WITHOUT_LINK
                else [("ip", "netns", "exec", name) for name, _ in HOSTS]
            )
        ]
        try:
            return max(process.wait() for process in ranks)
        finally:
            for process in ranks:
                process.kill()


if __name__ == "__main__":
    raise SystemExit(main())
