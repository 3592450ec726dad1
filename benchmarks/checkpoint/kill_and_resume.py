"""Kill `lightning fit` at random moments with SIGKILL, resume it, and compare its final state byte by byte.

The tiny embedded model, a LoRA with EMA, accumulation 4, sample sheets, a scored report and a guard. Each chain of runs
is killed and resumed until a run finishes; its files, weights, optimizer and EMA are then compared with those of a run
that was never killed, and one more `--resume` must change nothing. One third of the kills come at a random moment, one
third during a snapshot write, and one third in a phase after the last step: sampling, scoring, sheet, LoRA, report, or
the end of the manifest. Most runs are forked from a process that has imported everything, and call the command line's
`main`; some start the real command.

    python -m benchmarks.checkpoint.kill_and_resume [--kills 50] [--ranks 1] [--precision bf16-mixed 16-mixed]
        [--base nf4 | --sharded zero_3] [--output FILE]
    python -m benchmarks.checkpoint.kill_and_resume --throughput [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint.killable_run import Run, log_of, write_config
from benchmarks.checkpoint.snapshot_throughput import throughput
from benchmarks.common.rows import keep_row
from benchmarks.common.run_result import differing, result
from fakes.runs.kill_phases import ENDING, PHASES, PHASES_OF_WHOLE_MODELS, everything_in, told
from lightning_aigc.checkpoint import newest_complete


def newest(root: Path) -> int:
    found = newest_complete(root / "snapshots", lambda line: None) if (root / "snapshots").is_dir() else None
    return -1 if found is None else found.step


def is_writing(root: Path) -> bool:
    return any((root / "snapshots").glob(".step-*")) if (root / "snapshots").is_dir() else False


def measure(
    config: Path, folder: Path, kills: int, ranks: int, steps: int, chance: random.Random, phases: Sequence[str]
) -> dict[str, Any]:
    """Kill and resume until `kills` kills were made and the last chain has finished."""
    whole = folder / "whole"
    for _ in range(2):  # the first fills the caches
        shutil.rmtree(whole, ignore_errors=True)
        start = time.monotonic()
        if not Run(config, whole, ranks).end(300):
            raise SystemExit(f"the run that is never killed failed:\n{log_of(whole)}")
    seconds = time.monotonic() - start
    wanted = result(whole)
    counts = dict.fromkeys(
        ("kills", "kills_while_writing", "kills_after_the_last_step", "kills_of_one_rank", "chains", "different",
         "lost_snapshots", "failed_resumes", "changed_when_finished", "starts", "real_starts"), 0,
    )  # fmt: skip
    while counts["kills"] < kills:
        root = folder / f"chain{counts['chains']}"
        counts["chains"] += 1
        while kill_once(config, root, ranks, seconds, counts, chance, phases):
            pass
        names = differing(wanted, result(root)) if (root / "summary.json").exists() else ["nothing"]
        counts["different"] += bool(names)
        if names:
            print("DIFFERENT", root, names[:5], log_of(root), flush=True)
            continue
        before = everything_in(root)
        Run(config, root, ranks).end(60)
        counts["changed_when_finished"] += everything_in(root) != before
        shutil.rmtree(root)
        print(json.dumps(counts), flush=True)
    return counts | {"compared": len(wanted), "seconds_of_a_run": round(seconds, 1), "optimizer_steps": steps}


def kill_once(
    config: Path,
    root: Path,
    ranks: int,
    seconds: float,
    counts: dict[str, int],
    chance: random.Random,
    phases: Sequence[str],
) -> bool:
    """Start or resume a run and kill it. Returns: False if it finished first."""
    before = newest(root)
    real = counts["starts"] % 15 == 7
    counts["starts"] += 1
    counts["real_starts"] += real
    run = Run(config, root, ranks, real=real)
    began = time.monotonic()
    moment = chance.uniform(0.1, 0.5) * seconds + (8 if real else 0)
    kind = ("ending", "moment", "writing")[counts["kills"] % 3] if not real else "moment"
    phase = ENDING + phases[counts["kills"] // 3 % len(phases)]

    def is_due() -> bool:
        if kind == "ending":
            return phase in told(run.phases)
        return time.monotonic() - began > moment and (kind == "moment" or is_writing(root))

    while not is_due() and not run.is_over():
        time.sleep(0.0005)
    time.sleep(chance.uniform(0, 0.02))
    if run.is_over():
        if not run.end(60):
            counts["failed_resumes"] += 1
            print(log_of(root), flush=True)
        return False
    caught, is_ending = is_writing(root), any(line.startswith(ENDING) for line in told(run.phases))
    one = ranks > 1 and chance.random() < 0.5
    run.kill([chance.choice(run.pids)] if one else run.pids)
    run.end(30 if one else 10)  # one rank only: the others must notice and end
    counts["kills"] += 1
    counts["kills_while_writing"] += caught
    counts["kills_after_the_last_step"] += is_ending
    counts["kills_of_one_rank"] += one
    counts["lost_snapshots"] += newest(root) < before
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="for each precision")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--precision", nargs="+", default=["bf16-mixed", "16-mixed"])
    parser.add_argument("--sharded", choices=("zero_1", "zero_2", "zero_3"), help="full fine-tuning on 2 ranks or more")
    parser.add_argument("--base", help="base_quantization, such as nf4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--blocks", type=int, default=3, help="of 50 steps, in each run of --throughput")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cases = ["throughput"] if options.throughput else options.precision
        for case in cases:
            if options.throughput:
                row = throughput(folder, options.blocks, options.repeats)
            else:
                config = write_config(
                    folder, options.steps, case, options.ranks, 1, pictures=True, base=options.base,
                    sharded=options.sharded,
                )  # fmt: skip
                phases = PHASES_OF_WHOLE_MODELS if options.sharded else PHASES
                chance = random.Random(f"{options.seed}|{case}")
                row = measure(config, folder / case, options.kills, options.ranks, options.steps, chance, phases)
                bad += sum(
                    row[key] for key in ("different", "lost_snapshots", "failed_resumes", "changed_when_finished")
                )
                row = {
                    "precision": case,
                    "ranks": options.ranks,
                    "accumulation": 4,
                    "base": options.base,
                    "sharded": options.sharded,
                } | row
            row = {
                "benchmark": "kill_and_resume", "case": "throughput" if options.throughput else "kills",
                "device": "cpu, one thread a rank, shared",
                "torch": torch.__version__, **row,
            }  # fmt: skip
            keep_row(row, options.output)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
