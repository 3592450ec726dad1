"""The article's table with equal work on both sides: our stack and a plain one on two hosts with a slow link.

Two network namespaces joined by a token-bucket link simulate the hosts, with one single-threaded process each; they
need root and iproute2 (`--rate loopback` omits them and the link). The embedded Stable Diffusion learns the demo's
brand, once with its full U-Net and once with a LoRA. `plain` is diffusers' loop under torch's DDP with a fixed rate,
torch.save every N steps and no caches (plain_stack.py); `ours` is every feature together, and the other arms leave one
out (article_ours.py). Objective, batches, schedule, EMA, frequency of snapshots and the scored images are equal.
Scoring is not timed or counted; the start of the run, our caches and the guard's checks are. One row per training;
existing rows are not computed again.

    python -m benchmarks.end_to_end.article_table [--jobs full lora] [--rate 1gbit] [--seeds 0 1 2] [--output FILE]
        [--steps 200]
    python -m benchmarks.end_to_end.article_table --table [--output FILE]  # Markdown from the rows
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.common.rows import keep_row, read_rows
from benchmarks.end_to_end.article_markdown import markdown
from benchmarks.gradient_sync.two_hosts import HOSTS, two_hosts

PARTS = ("npu_sparse", "fused_backward", "adaptive_lr", "guard", "caches", "background_snapshots")
ARMS = ("plain", "ours", *(f"without {part}" for part in PARTS))
EVERY_SEED = ("plain", "ours", "without npu_sparse")
"""Arms that are trained with every seed; the others only with the first."""
ROWS = RESULTS / "end_to_end" / "article_table.jsonl"
LIMIT_S = 900
"""Time limit of a training; a longer one is ended with an error."""


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The trainings, the most important for the table first."""
    for seed in options.seeds:
        for arm in options.arms:
            if arm in EVERY_SEED or seed == options.seeds[0]:
                for job in options.jobs:
                    yield {"job": job, "arm": arm, "rate": options.rate, "seed": seed, "steps": options.steps}


def run_cell(cell: dict[str, Any], port: int) -> dict[str, Any]:
    """Train on both hosts. Returns: rank 0's row. Raises: SystemExit with the end of the log of a rank that failed."""
    is_linked = cell["rate"] != "loopback"
    starts = [("ip", "netns", "exec", name) for name, _ in HOSTS] if is_linked else [()] * 2
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "aigc0" if is_linked else "lo",
        "MASTER_ADDR": HOSTS[0][1] if is_linked else "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(2)]
        words = [
            sys.executable,
            "-m",
            "benchmarks.end_to_end.article_table",
            "--cell",
            json.dumps(cell),
            "--folder",
            folder,
        ]
        ranks = []
        for rank, before in enumerate(starts):
            own = environment | {"RANK": str(rank), "NODE_RANK": str(rank)}
            with logs[rank].open("w") as log:
                ranks.append(subprocess.Popen([*before, *words], env=own, stdout=log, stderr=log))
        try:
            codes = [process.wait(LIMIT_S) for process in ranks]
        except subprocess.TimeoutExpired:
            codes = [process.poll() for process in ranks]  # type: ignore[misc]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes) or None in codes:
            tails = "\n".join(
                f"rank {rank} ({code}):\n{logs[rank].read_text()[-2000:]}" for rank, code in enumerate(codes)
            )
            raise SystemExit(f"{cell} failed:\n{tails}")
        row: dict[str, Any] = json.loads(Path(folder, "row.json").read_text(encoding="utf-8"))
        return row


def run_rank(cell: dict[str, Any], folder: Path) -> None:
    """Train on this rank; rank 0 writes the row."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from benchmarks.end_to_end.article_jobs import JOBS
    from benchmarks.end_to_end.article_meter import Meter, Scorer, measured
    from benchmarks.end_to_end.article_ours import run_ours
    from benchmarks.end_to_end.plain_stack import run_plain

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    job = JOBS[cell["job"]].of(cell["steps"])
    meter = Meter(os.environ["GLOO_SOCKET_IFNAME"])
    scorer = Scorer(meter, job.score_images, job.score_steps, job.steps)
    meter.resume()
    if cell["arm"] == "plain":
        found = run_plain(job, cell["seed"], folder / "run", meter, scorer)
    else:
        without = cell["arm"].removeprefix("without ") if cell["arm"] != "ours" else None
        found = run_ours(job, cell["seed"], folder / "run", meter, scorer, without)
    row = {"benchmark": "article_table", **cell}
    row |= {"planned_steps": cell["steps"], "batch_per_rank": job.batch, "ranks": 2, "threads": 1, "device": "cpu"}
    row |= {"torch": torch.__version__, "python": platform.python_version()}
    row |= measured(meter, scorer, found.pop("done")) | found
    if dist.get_rank() == 0:
        (folder / "row.json").write_text(json.dumps(row))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # does not wait for process groups that are no longer used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--rate", default="1gbit", help="rate of the link in tc's notation, or loopback")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=ROWS)
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of a training; a small number only checks that it runs"
    )
    parser.add_argument("--table", action="store_true", help="print the existing rows as Markdown")
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell is not None:
        run_rank(options.cell, options.folder)
    if options.table:
        print(markdown(read_rows(options.output)))
        return 0
    known = [
        {key: row[key] for key in ("job", "arm", "rate", "seed")} | {"steps": row["planned_steps"]}
        for row in read_rows(options.output)
    ]
    hosts = contextlib.nullcontext() if options.rate == "loopback" else two_hosts(options.rate)
    with hosts:
        for number, cell in enumerate(cells(options)):
            if cell in known:
                continue
            row = run_cell(cell, free_port() if options.rate == "loopback" else 29600 + number)
            keep_row(row, options.output)
    return 0


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())
