"""Bytes per second of Gloo's all_to_all and all_gather between two hosts, in one message and in pieces.

Two network namespaces with a token-bucket link simulate the hosts, with a process of one thread each. Both methods
alternate; rates are of one direction, the median and the worst of the rounds. Needs root and iproute2.

    python -m benchmarks.studies.gloo_pieces [--rates 200mbit 1gbit 10gbit] [--rounds 7] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.rows import keep_row
from benchmarks.gradient_sync.two_hosts import DEVICE, HOSTS, enter, two_hosts
from lightning_aigc.gradient_sync.transport.chunked_exchange import (
    CHUNK_BYTES,
    IN_FLIGHT,
    ChunkedExchanges,
    chunked_where_slow,
)
from lightning_aigc.gradient_sync.transport.collectives import all_gather

ROW_MB = (1, 3, 6)
"""MB that each rank sends to the other: a unit of 25 MB of gradients is 1.4 in three bits, 3.1 in eight."""


def wait(start: Callable[..., Any], *tensors: Tensor) -> None:
    start(*tensors).wait()


def measure(rank: int, rounds: int, folder: str) -> None:
    """Measure on one rank; rank 0 writes the rows."""
    enter(HOSTS[rank][0])
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    chosen = chunked_where_slow(dist.group.WORLD) is not None
    chunked = ChunkedExchanges(dist.group.WORLD)
    rows = []
    for megabytes in ROW_MB:
        size = megabytes * 1_000_000
        both, out, own = (torch.zeros(n, dtype=torch.uint8) for n in (2 * size, 2 * size, size))
        calls: dict[tuple[str, str], Callable[[], Any]] = {
            ("all_to_all", "whole"): partial(dist.all_to_all_single, out, both),
            ("all_to_all", "pieces"): partial(wait, chunked.all_to_all, out, both),
            ("all_gather", "whole"): partial(all_gather, out, own),
            ("all_gather", "pieces"): partial(wait, chunked.all_gather, out, own),
        }
        times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
        for _ in range(rounds + 1):
            for name, call in calls.items():
                dist.barrier()
                time.sleep(0.1)  # wait until the token bucket is full again
                dist.barrier()
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        for (collective, how), seconds in times.items():
            rows.append({
                "collective": collective, "how": how, "row_mb": megabytes,
                "MBps": round(megabytes / statistics.median(seconds[1:]), 1),
                "worst_MBps": round(megabytes / max(seconds[1:]), 1), "takes_pieces": chosen,
            })  # fmt: skip
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit", "10gbit"], help="in tc's notation")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    about = {
        "benchmark": "gloo_pieces", "torch": torch.__version__, "device": "cpu",
        "rounds": options.rounds, "piece_bytes": CHUNK_BYTES, "in_flight": IN_FLIGHT,
    }  # fmt: skip
    for rate in options.rates:
        with two_hosts(rate), tempfile.TemporaryDirectory() as folder:
            ranks = [multiprocessing.Process(target=measure, args=(rank, options.rounds, folder)) for rank in (0, 1)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            for row in json.loads(Path(folder, "rows.json").read_text(encoding="utf-8")):
                keep_row({**about, "rate": rate, **row}, options.output)


if __name__ == "__main__":
    main()
