"""Milliseconds of a sum that is scattered over the ranks of a node: Gloo's reduce_scatter, and rows added by each rank.

Processes of one thread each on one machine. Both methods alternate; times are the slowest rank's, medians over rounds.
The sums must be bit-identical.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.gloo_node_sums [--ranks 2 4] [--rounds 9] [--output FILE]
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.rows import keep_row
from benchmarks.gradient_sync.scaling_model import timed_in_turns
from lightning_aigc.gradient_sync.transport.collectives import CountedGroup, Traffic, reduce_scatter

UNITS_MB = (1, 26)
"""Sizes of a unit's float32 gradients: DDP's first bucket, and the other buckets."""


def add_rows(group: CountedGroup, out: Tensor, tensor: Tensor) -> None:
    group.reduce_scatter(out, tensor).wait()


def measure(rank: int, ranks: int, rounds: int, folder: str) -> None:
    """Measure on one rank; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    group = CountedGroup(dist.group.WORLD, Traffic())
    rows = []
    for megabytes in UNITS_MB:
        numel = megabytes * 250_000
        generator = torch.Generator().manual_seed(rank)
        gradients, outs = torch.randn(numel, generator=generator), torch.zeros(2, numel // ranks)
        steps: dict[str, Callable[[], Any]] = {
            "reduce_scatter": partial(reduce_scatter, outs[0], gradients),
            "rows, added": partial(add_rows, group, outs[1], gradients),
        }
        times = timed_in_turns(steps, rounds)
        milliseconds = {f"{name} ms": round(1e3 * statistics.median(of), 2) for name, of in times.items()}
        difference = float((outs[0] - outs[1]).abs().max())
        rows.append({"unit_mb": megabytes, **milliseconds, "largest_difference": difference})
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            work = [
                multiprocessing.Process(target=measure, args=(rank, ranks, options.rounds, folder))
                for rank in range(ranks)
            ]
            for process in work:
                process.start()
            for process in work:
                process.join()
            for row in json.loads(Path(folder, "rows.json").read_text(encoding="utf-8")):
                about = {
                    "benchmark": "gloo_node_sums", "torch": torch.__version__,
                    "device": f"cpu, {os.cpu_count()} cores, one thread a rank", "rounds": options.rounds,
                }  # fmt: skip
                keep_row({**about, "ranks": ranks, **row}, options.output)


if __name__ == "__main__":
    main()
