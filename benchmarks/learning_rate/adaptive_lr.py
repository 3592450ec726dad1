"""AdaptiveLR against the fixed schedule on a grid of paired trainings that its constants were not tuned on.

The embedded tiny Stable Diffusion learns its brand as in configs/sd_lora_demo.yaml (300 steps, cosine, 10 steps of
warm-up, the same data). Settings: the demo's LoRA with batches of 1, 4 and 16, and a full fine-tuning of the U-Net with
batches of 4. The setting's rate (1e-3 for the LoRA, 1e-4 for the full fine-tuning) is multiplied by 1, 3, 10 and 30.
The score is CLIP-T of 48 images of three objects that no brand image shows, sampled with the averaged weights after
the last step. A run that scores below the untrained model at a check has diverged and is stopped.

    # repeat the command to continue
    python -m benchmarks.learning_rate.adaptive_lr --jobs 16 --time_limit_s 420 --output rows.jsonl
    python -m benchmarks.learning_rate.adaptive_lr --settings lora-1 --times 1 --seeds 100 101 --jobs 1
        --output rows.jsonl
    python -m benchmarks.learning_rate.adaptive_lr --variants fixed adaptive prodigy schedule_free --every 20
        --settings lora-4 ...
    # print the rows as Markdown
    python -m benchmarks.learning_rate.adaptive_lr --table benchmarks/results/learning_rate/adaptive_lr.jsonl

Each run is a separate process with one thread. Its JSON row is appended to the output when it ends; runs that are
already in the output are skipped. Needs no network.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or a device query before the fork breaks the children

import argparse
import contextlib
import math
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from benchmarks import RESULTS
from benchmarks.common.forked_child import Child, be_quiet
from benchmarks.common.rows import keep_row, read_rows
from benchmarks.learning_rate.table import VARIANTS, goals, table
from benchmarks.learning_rate.training import SETTINGS, Cell, Score, train
from lightning_aigc.metrics import CLIPSimilarity

ROWS = RESULTS / "learning_rate" / "adaptive_lr.jsonl"
TIMES = (1.0, 3.0, 10.0, 30.0)
SEEDS = (100, 101, 102, 103, 104)
ONLY_AT = {"prodigy": (1.0,), "schedule_free": (1.0, 3.0)}
"""Multiples of the rate at which a variant is meaningful; unlisted: all."""


def _untrained(judge: CLIPSimilarity, folder: str, device: str) -> float:
    """Score before the first step; also fills the cache of latents and captions."""
    first = Cell("lora-4", 1.0, 0, "fixed")
    found: list[float] = []

    class Before(Score):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            found.append(self.score(pl_module, 3))

    train(first, judge, folder, device, steps=1, scored_by=Before)
    return found[0]


def cells_to_run(options: argparse.Namespace, done: set[Cell]) -> list[Cell]:
    """The runs, seed by seed with the variants of a pair adjacent, so that a partial grid is balanced."""
    return [
        cell
        for seed in options.seeds
        for setting in SETTINGS
        for times in options.times
        for variant in options.variants
        if setting in options.settings and times in ONLY_AT.get(variant, (times,))
        if (cell := Cell(setting, times, seed, variant)) not in done
    ]


def run_all(options: argparse.Namespace) -> int:
    """Run the cells that the output lacks. Returns: the number of failed runs."""
    began = time.monotonic()
    until = began + options.time_limit_s
    be_quiet()
    done = {Cell.of_row(row) for row in read_rows(options.output)}
    todo = cells_to_run(options, done)
    print(f"{len(todo)} runs to make, {len(done)} rows in {options.output}", flush=True)
    if not todo:
        return 0
    judge = CLIPSimilarity("embedded:clip")
    judge.check()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        untrained = Child(_untrained, judge, folder, options.device).result()
        print(f"the untrained model scores {untrained:.3f}; ready after {time.monotonic() - began:.0f} s", flush=True)
        running: dict[Connection, tuple[Cell, Child]] = {}
        while (todo and time.monotonic() < until) or running:
            while todo and len(running) < options.jobs and time.monotonic() < until:
                cell = todo.pop(0)
                child = Child(train, cell, judge, folder, options.device, untrained, options.every)
                running[child.connection] = cell, child
            ready = wait(list(running), timeout=min(60.0, max(0.0, until - time.monotonic())))
            for connection in [there for there in running if there in ready]:
                cell, child = running.pop(connection)
                try:
                    row = child.result()
                except RuntimeError as error:
                    failed += 1
                    print(f"{cell} failed: {error}", file=sys.stderr, flush=True)
                    continue
                keep_row(row, options.output)
                print(
                    f"{time.monotonic() - began:5.0f} s  {cell.setting} x{cell.times:g} seed {cell.seed} "
                    f"{cell.variant}: {row['final']:.3f} in {row['seconds']} s",
                    flush=True,
                )
            if time.monotonic() >= until and running:
                print(f"time is up: {len(running)} runs ended, {len(todo)} not begun", flush=True)
                for _, child in running.values():
                    child.end()
                running.clear()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--times", nargs="+", type=float, default=list(TIMES), help="multiples of the setting's rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS[:2]))
    parser.add_argument("--every", type=int, default=0, help="also score every N steps, to find the steps to a goal")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, one thread each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--time_limit_s", type=float, default=math.inf, help="begin no run after it, and end those on")
    parser.add_argument("--output", type=Path, default=ROWS)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the rows of a file as tables and run nothing")
    options = parser.parse_args()
    if options.table:
        rows = read_rows(options.table)
        print("\n\n".join(part for part in (table(rows), goals(rows)) if part))
        return
    with contextlib.suppress(ValueError):
        options.output = options.output.resolve()
    failed = run_all(options)
    rows = read_rows(options.output)
    print("\n\n".join(part for part in (table(rows), goals(rows)) if part))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
