"""Kill `lightning fit` at random moments with SIGKILL, resume it, and compare what it ends with, byte for byte.

The tiny embedded model, a LoRA with EMA, accumulation 4. A chain of runs is killed and resumed until one gets to its
end; its weights, optimizer and EMA are then compared with those of a run that was never killed. Every second kill waits
for a snapshot that is being written. Most runs are forked from one process that has imported everything and go through
the command line's `main`; some start the real command.

    python benchmarks/kill_and_resume.py [--kills 50] [--ranks 1] [--precision bf16-mixed 16-mixed] [--output FILE]
    python benchmarks/kill_and_resume.py --throughput [--output FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file

from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.checkpoint import find_snapshots, newest_complete
from lightning_aigc.cli import aigc_cli  # noqa: F401 - imported once, for all the runs that are forked
from lightning_aigc.cli import main as command

DEMO = Path(__file__).parents[1] / "configs" / "sd_lora_demo.yaml"


def write_config(folder: Path, steps: int, precision: str, ranks: int, every: int) -> Path:
    """The demo without pictures: few steps, a snapshot after every `every`."""
    config: dict[str, Any] = yaml.safe_load(DEMO.read_text(encoding="utf-8"))
    config["trainer"] |= {
        "accumulate_grad_batches": 4, "enable_progress_bar": False, "enable_model_summary": False, "logger": False,
        "callbacks": [{"class_path": "RunReport", "init_args": {"clip_model": None, "prompts": []}}],
    }  # fmt: skip
    config["trainer"]["plugins"]["init_args"]["precision"] = precision
    if ranks > 1:
        config["trainer"] |= {
            "devices": ranks,
            "strategy": {"class_path": "NPUSparseStrategy", "init_args": {"process_group_backend": "gloo"}},
        }
    config["model"]["init_args"] |= {
        "max_train_steps": steps, "validation_prompts": [], "rank": 4, "checkpointing_steps": every or 50,
        "checkpoints_total_limit": 3 if every else 0,
        "lora_targets": ["attention"], "lr_warmup_steps": 2, "lora_dropout": 0.1,
    }  # fmt: skip
    # The class pictures stay out: an epoch is then so short that kills come at its ends too.
    config["data"]["init_args"] |= {
        "train_batch_size": 4, "random_flip": True, "class_data_dir": None, "cache_dir": str(folder / "cache"),
        "num_workers": 0,
    }  # fmt: skip
    path = folder / f"{precision}-{ranks}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Run:
    """One `lightning fit --resume`, one process a rank."""

    def __init__(self, config: Path, root: Path, ranks: int, *, real: bool = False, resumes: bool = True) -> None:
        words = ["fit", "-c", str(config), "--trainer.default_root_dir", str(root), *(["--resume"] if resumes else [])]
        root.mkdir(parents=True, exist_ok=True)
        self.log = (root / "log.txt").open("ab")
        environment = {"OMP_NUM_THREADS": "1"}
        if ranks > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "NODE_RANK": "0"}
        self.pids = [
            self._start(words, environment | ({"LOCAL_RANK": str(k)} if ranks > 1 else {}), real) for k in range(ranks)
        ]
        self.codes: dict[int, int] = {}

    def _start(self, words: list[str], environment: dict[str, str], real: bool) -> int:
        if real:
            process = subprocess.Popen(
                [sys.executable, "-m", "lightning_aigc", *words],
                env=os.environ | environment, stdout=self.log, stderr=self.log,
            )  # fmt: skip
            return process.pid
        pid = os.fork()
        if pid:
            return pid
        os.environ |= environment
        os.dup2(self.log.fileno(), 1)
        os.dup2(self.log.fileno(), 2)
        sys.argv = ["lightning"]
        code = 99
        try:
            command(words)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 98
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)

    def is_over(self) -> bool:
        for pid in self.pids:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def kill(self, which: list[int]) -> None:
        for pid in which:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self, timeout_s: float) -> bool:
        """Wait; whether all ranks ended by themselves and well."""
        deadline = time.monotonic() + timeout_s
        while not self.is_over() and time.monotonic() < deadline:
            time.sleep(0.01)
        ended = self.is_over()
        if not ended:
            self.kill([pid for pid in self.pids if pid not in self.codes])
            while not self.is_over():
                time.sleep(0.01)
        self.log.close()
        return ended and not any(self.codes.values())


def result(root: Path) -> dict[str, torch.Tensor]:
    """All that a run ends with, by name: the LoRA file, and the trained weights, optimizer and EMA of its snapshot."""
    found = {f"lora.{name}": value for name, value in load_file(root / "zorp.safetensors").items()}
    snapshot = find_snapshots(root / "snapshots")[0]
    shared = snapshot.shared()
    for key in ("state_dict", "optimizer_states", "ema", "lr_schedulers"):
        found |= dict(_tensors(shared[key], key))
    return found


def _tensors(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(one, f"{path}.{key}")


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bytes differ, and names that only one has."""

    def raw(value: torch.Tensor) -> bytes:
        return (
            value.contiguous().view(torch.uint8).numpy().tobytes()
            if value.dim()
            else value.view(1).view(torch.uint8).numpy().tobytes()
        )

    shared = one.keys() & other.keys()
    return sorted(one.keys() ^ other.keys()) + [name for name in shared if raw(one[name]) != raw(other[name])]


def newest(root: Path) -> int:
    found = newest_complete(root / "snapshots", lambda line: None) if (root / "snapshots").is_dir() else None
    return -1 if found is None else found.step


def is_writing(root: Path) -> bool:
    return any((root / "snapshots").glob(".step-*")) if (root / "snapshots").is_dir() else False


def measure(config: Path, folder: Path, kills: int, ranks: int, steps: int, chance: random.Random) -> dict[str, Any]:
    """Kill and resume until there were so many kills and the last chain is at its end."""
    whole = folder / "whole"
    for _ in range(2):  # the first fills the caches
        shutil.rmtree(whole, ignore_errors=True)
        start = time.monotonic()
        if not Run(config, whole, ranks).end(300):
            raise SystemExit(
                f"the run that is never killed failed: {whole / 'log.txt'}\n{(whole / 'log.txt').read_text()[-3000:]}"
            )
    seconds = time.monotonic() - start
    wanted = result(whole)
    counts = {
        "kills": 0,
        "kills_while_writing": 0,
        "kills_of_one_rank": 0,
        "chains": 0,
        "different": 0,
        "lost_snapshots": 0,
        "failed_resumes": 0,
        "starts": 0,
        "real_starts": 0,
    }
    while counts["kills"] < kills:
        root = folder / f"chain{counts['chains']}"
        counts["chains"] += 1
        while True:
            before = newest(root)
            real = counts["starts"] % 15 == 7
            counts["starts"] += 1
            counts["real_starts"] += real
            run = Run(config, root, ranks, real=real)
            began = time.monotonic()
            moment = chance.uniform(0.1, 0.35) * seconds + (8 if real else 0)
            while_writing = counts["kills"] % 2 == 1
            alive = True
            while alive and time.monotonic() - began < moment:
                time.sleep(0.002)
                alive = not run.is_over()
            if while_writing:
                while alive and not is_writing(root):
                    time.sleep(0.0005)
                    alive = not run.is_over()
                time.sleep(chance.uniform(0, 0.02))
            if run.is_over():
                if run.end(60):
                    break
                counts["failed_resumes"] += 1
                print((root / "log.txt").read_text()[-2000:], flush=True)
                break
            caught = is_writing(root)
            one = ranks > 1 and chance.random() < 0.5
            run.kill([chance.choice(run.pids)] if one else run.pids)
            if one:  # the others are left to find out, and to end
                run.end(30)
            else:
                run.end(10)
            counts["kills"] += 1
            counts["kills_while_writing"] += caught
            counts["kills_of_one_rank"] += one
            if newest(root) < before:
                counts["lost_snapshots"] += 1
        names = differing(wanted, result(root)) if (root / "zorp.safetensors").exists() else ["nothing"]
        counts["different"] += bool(names)
        if names:
            print("DIFFERENT", root, names[:5], flush=True)
        else:
            shutil.rmtree(root)
        print(json.dumps(counts), flush=True)
    return counts | {"tensors_compared": len(wanted), "seconds_of_a_run": round(seconds, 1), "optimizer_steps": steps}


TURN = 10
"""Optimizer steps; a snapshot, every 50 steps, lies in the middle of a turn, so that it is written before its end."""


class Clock(Callback):
    """Writes down each optimizer step's moment, wall clock and CPU seconds, and stops its process after each turn."""

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
        Path(self.path).write_text(json.dumps({"steps": self.steps, "blocked_s": blocked}))

    def _stop(self) -> None:
        start = time.perf_counter()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.stopped_s += time.perf_counter() - start

    def _now(self) -> list[float]:
        return [time.perf_counter() - self.stopped_s, time.process_time()]


def take_turns(runs: list[Run]) -> None:
    """Let one run go on at a time, until it stops itself."""
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
                    raise SystemExit(Path(run.log.name).read_text()[-3000:])


def throughput(folder: Path, blocks: int, repeats: int) -> dict[str, Any]:
    """Blocks of 50 steps, one with a snapshot and one of a run without any, in turns of 10 steps.

    A block begins 25 steps before a snapshot. The turns share what others do to the machine out to both; the ratio is
    the median over the pairs. CPU time, which others take nothing of, has the writer's thread in it.
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
            clock = {"class_path": "__main__.Clock", "init_args": {"path": str(told[every])}}
            text["trainer"]["callbacks"].append(clock)
            path = folder / f"speed{every}.yaml"
            path.write_text(yaml.safe_dump(text))
            root = folder / f"speed{every}"
            shutil.rmtree(root, ignore_errors=True)
            runs.append(Run(path, root, 1, resumes=False))
            os.waitpid(runs[-1].pids[0], os.WUNTRACED)  # at its first step; the other finds the caches full
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


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="for each precision")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--precision", nargs="+", default=["bf16-mixed", "16-mixed"])
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
                config = write_config(folder, options.steps, case, options.ranks, 1)
                chance = random.Random(f"{options.seed}|{case}")
                row = measure(config, folder / case, options.kills, options.ranks, options.steps, chance)
                bad += row["different"] + row["lost_snapshots"] + row["failed_resumes"]
                row = {"precision": case, "ranks": options.ranks, "accumulation": 4, **row}
            row = {
                "benchmark": "kill_and_resume", "case": "throughput" if options.throughput else "kills",
                "date": date.today().isoformat(), "device": "cpu, one thread a rank, shared",
                "torch": torch.__version__, **row,
            }  # fmt: skip
            print(json.dumps(row), flush=True)
            if options.output:
                with options.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
