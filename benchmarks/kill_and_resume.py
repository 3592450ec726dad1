"""Kill `lightning fit` at random moments with SIGKILL, resume it, and compare what it ends with, byte for byte.

The tiny embedded model, a LoRA with EMA, accumulation 4, sample sheets, a scored report and a guard. A chain of runs is
killed and resumed until one gets to its end; its files, weights, optimizer, EMA are then compared with those of a run
that was never killed, and one more `--resume` must change nothing. Of three kills one comes at any moment, one waits
for a snapshot that is being written, and one for a phase after the last step: drawing, scoring, a sheet, the LoRA, the
report, the manifest's last word. Most runs are forked from one process that has imported everything and go through the
command line's `main`; some start the real command.

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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes.kill_phases import ENDING, PHASES, everything_in, tell_phases, told
from fakes.ranks import meeting_point
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.checkpoint import find_snapshots, newest_complete
from lightning_aigc.cli import aigc_cli  # noqa: F401 - imported once, for all the runs that are forked
from lightning_aigc.cli import main as command

DEMO = Path(__file__).parents[1] / "configs" / "sd_lora_demo.yaml"


PROMPTS = ["a zorp umbrella", "a zorp teapot"]
GUARD = {"prompts": PROMPTS, "num_images": 1, "stop": False, "min_delta": 0.0, "clip_model": "embedded:clip"}


def write_config(folder: Path, steps: int, precision: str, ranks: int, every: int, *, pictures: bool = False) -> Path:
    """The demo with few steps and a snapshot after every `every`; few pictures, or none."""
    config: dict[str, Any] = yaml.safe_load(DEMO.read_text(encoding="utf-8"))
    report: dict[str, Any] = {"clip_model": None, "prompts": []}
    if pictures:
        report = {"clip_model": "embedded:clip", "prompts": PROMPTS, "num_images": 2, "prior_prompts": PROMPTS[:1]}
    callbacks = [{"class_path": "RunReport", "init_args": report}]
    if pictures:
        guard = GUARD | {"every_n_steps": max(1, steps // 2)}
        callbacks.append({"class_path": "CLIPConvergenceGuard", "init_args": guard})
    config["trainer"] |= {
        "accumulate_grad_batches": 4, "enable_progress_bar": False, "enable_model_summary": False, "logger": False,
        "callbacks": callbacks,
    }  # fmt: skip
    config["trainer"]["plugins"]["init_args"]["precision"] = precision
    if ranks > 1:
        config["trainer"] |= {
            "devices": ranks,
            "strategy": {"class_path": "NPUSparseStrategy", "init_args": {"process_group_backend": "gloo"}},
        }
    config["model"]["init_args"] |= {
        "max_train_steps": steps, "validation_prompts": PROMPTS if pictures else [], "num_validation_images": 1,
        "validation_steps": max(1, steps // 2 + 1), "num_inference_steps": 4, "rank": 4,
        "checkpointing_steps": every or 50,
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
        root.parent.mkdir(parents=True, exist_ok=True)
        self.log = root.with_name(f"{root.name}.log").open("ab")
        self.phases = root.with_name(f"{root.name}.phases")
        self.phases.unlink(missing_ok=True)
        environment = {"OMP_NUM_THREADS": "1"}
        self._meeting = meeting_point()
        if ranks > 1:
            environment |= self._meeting.__enter__() | {"NODE_RANK": "0"}
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
            tell_phases(self.phases)
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
        self._meeting = meeting_point()  # the store of before goes
        return ended and not any(self.codes.values())


def result(root: Path) -> dict[str, torch.Tensor]:
    """All that a run ends with, by name: its files, and the trained weights, optimizer and EMA of its snapshot."""
    snapshot = find_snapshots(root / "snapshots")[0]
    assert snapshot.facts["is_finished"]
    found: dict[str, torch.Tensor] = {}
    for path in sorted(root.glob("*.safetensors")):  # their headers have times in them
        found |= {f"{path.name}.{name}": value for name, value in load_file(path).items()}
    shared = snapshot.shared()
    for key in ("state_dict", "optimizer_states", "ema", "lr_schedulers"):
        found |= dict(_tensors(shared[key], key))
    summary = json.loads((root / "summary.json").read_text())
    for key in ("seconds", "peak_memory_mib", "lora_file", "report", "notes"):
        del summary[key]
    assert (root / "report.html").stat().st_size > 1000
    written = {"summary": json.dumps(summary).encode()}
    written |= {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.png")}
    return found | {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in written.items()}


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
        while kill_once(config, root, ranks, seconds, counts, chance):
            pass
        names = differing(wanted, result(root)) if (root / "summary.json").exists() else ["nothing"]
        counts["different"] += bool(names)
        if names:
            print("DIFFERENT", root, names[:5], log_of(root), flush=True)
            continue
        before = everything_in(root)
        Run(config, root, 1).end(60)
        counts["changed_when_finished"] += everything_in(root) != before
        shutil.rmtree(root)
        print(json.dumps(counts), flush=True)
    return counts | {"compared": len(wanted), "seconds_of_a_run": round(seconds, 1), "optimizer_steps": steps}


def kill_once(
    config: Path, root: Path, ranks: int, seconds: float, counts: dict[str, int], chance: random.Random
) -> bool:
    """Start or resume a run and kill it; False where it got to its end first."""
    before = newest(root)
    real = counts["starts"] % 15 == 7
    counts["starts"] += 1
    counts["real_starts"] += real
    run = Run(config, root, ranks, real=real)
    began = time.monotonic()
    moment = chance.uniform(0.1, 0.5) * seconds + (8 if real else 0)
    kind = ("ending", "moment", "writing")[counts["kills"] % 3] if not real else "moment"
    phase = ENDING + PHASES[counts["kills"] // 3 % len(PHASES)]

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
    run.end(30 if one else 10)  # of one rank: the others are left to find out, and to end
    counts["kills"] += 1
    counts["kills_while_writing"] += caught
    counts["kills_after_the_last_step"] += is_ending
    counts["kills_of_one_rank"] += one
    counts["lost_snapshots"] += newest(root) < before
    return True


def log_of(root: Path) -> str:
    return root.with_name(f"{root.name}.log").read_text()[-3000:]


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
                config = write_config(folder, options.steps, case, options.ranks, 1, pictures=True)
                chance = random.Random(f"{options.seed}|{case}")
                row = measure(config, folder / case, options.kills, options.ranks, options.steps, chance)
                bad += sum(
                    row[key] for key in ("different", "lost_snapshots", "failed_resumes", "changed_when_finished")
                )
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
