"""Cost of snapshots in training throughput: two runs, with and without snapshots, that alternate."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.checkpoint.killable_run import Run, write_config
from lightning_aigc.callbacks import ExactSnapshot

TURN = 10
"""Optimizer steps per turn. A snapshot, every 50 steps, falls in the middle of a turn and is written before its end."""


class Clock(Callback):
    """Record wall-clock and CPU seconds at each optimizer step, and stop the process after each turn."""

    def __init__(self, path: str) -> None:
        self.path, self.steps, self.stopped_s = path, [[0.0] * 2], 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        self.steps = [self._now()]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == len(self.steps):
            self.steps.append(self._now())
            if trainer.global_step % TURN == TURN // 2:
                self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        blocked = [s for c in trainer.callbacks if isinstance(c, ExactSnapshot) for s in c.blocked_s]  # type: ignore[attr-defined]
        Path(self.path).write_text(json.dumps({"steps": self.steps, "blocked_s": blocked}), encoding="utf-8")

    def _stop(self) -> None:
        start = time.perf_counter()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.stopped_s += time.perf_counter() - start

    def _now(self) -> list[float]:
        return [time.perf_counter() - self.stopped_s, time.process_time()]


def take_turns(runs: list[Run]) -> None:
    """Continue one stopped run at a time, until it stops itself."""
    waiting = {run.pids[0]: run for run in runs}
    while waiting:
        for pid in list(waiting):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            _, status = os.waitpid(pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                run = waiting.pop(pid)
                run.codes[pid] = os.waitstatus_to_exitcode(status)
                if not run.end(1):
                    raise SystemExit(Path(run.log.name).read_text(encoding="utf-8")[-3000:])


def throughput(folder: Path, blocks: int, repeats: int) -> dict[str, Any]:
    """Time blocks of 50 steps with a snapshot and without, in alternating turns of 10 steps.

    A block begins 25 steps before a snapshot. Alternating turns expose both runs to the same load; the ratio is the
    median over the pairs. CPU time does not depend on other load and includes the writer's thread.
    """
    times: dict[int, list[list[float]]] = {50: [], 0: []}
    blocked: list[float] = []
    for repeat in range(repeats):
        told = {}
        runs = []
        for every in times if repeat % 2 else reversed(times):
            config = write_config(folder, 50 * blocks + 25, "bf16-mixed", 1, every)
            text = yaml.safe_load(config.read_text(encoding="utf-8"))
            told[every] = folder / f"clock{every}.json"
            clock = {"class_path": "snapshot_throughput.Clock", "init_args": {"path": str(told[every])}}
            text["trainer"]["callbacks"].append(clock)
            path = folder / f"speed{every}.yaml"
            path.write_text(yaml.safe_dump(text))
            root = folder / f"speed{every}"
            shutil.rmtree(root, ignore_errors=True)
            runs.append(Run(path, root, 1, resumes=False))
            os.waitpid(runs[-1].pids[0], os.WUNTRACED)  # at its first step; the second run finds the caches filled
        take_turns(runs)
        for every, path in told.items():
            found = json.loads(path.read_text())
            marks = itertools.pairwise(found["steps"][25::50])
            times[every] += [[b - a for a, b in zip(one, other, strict=True)] for one, other in marks]
            blocked += found["blocked_s"]
    row: dict[str, Any] = {"steps_of_a_block": 50, "blocks": len(times[50]), "load": round(os.getloadavg()[0], 2)}
    for at, name in enumerate(("wall", "cpu")):
        pairs = [(one[at], other[at]) for one, other in zip(times[50], times[0], strict=True)]
        ratios = [other / one for one, other in pairs]
        row |= {
            f"{name}_s_with": [round(one, 3) for one, _ in pairs],
            f"{name}_s_without": [round(other, 3) for _, other in pairs],
            f"{name}_ratio": round(statistics.median(ratios), 4),
            f"{name}_ratio_spread": [round(min(ratios), 4), round(max(ratios), 4)],
        }
    return row | {
        "blocked_ms": round(1e3 * statistics.median(blocked), 1),
        "blocked_spread_ms": [round(1e3 * min(blocked), 1), round(1e3 * max(blocked), 1)],
        "throughput_ratio": row["wall_ratio"],
    }
