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
from safetensors.torch import load_file

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


def throughput(folder: Path, steps: int, repeats: int) -> dict[str, Any]:
    """Seconds of training with a snapshot every 50 steps and with none, in turns."""
    times: dict[int, list[float]] = {50: [], 0: []}
    for repeat in range(repeats + 1):
        for every in times if repeat % 2 else reversed(times):
            config = write_config(folder, steps, "bf16-mixed", 1, every)
            root = folder / f"speed{every}"
            shutil.rmtree(root, ignore_errors=True)
            if not Run(config, root, 1, resumes=False).end(600):
                raise SystemExit((root / "log.txt").read_text()[-3000:])
            if repeat:  # the first fills the caches
                times[every].append(json.loads((root / "summary.json").read_text())["seconds"])
    medians = {every: statistics.median(of) for every, of in times.items()}
    return {
        "steps": steps, "seconds_with": medians[50], "seconds_without": medians[0], "repeats": repeats,
        "all_with": times[50], "all_without": times[0],
        "throughput_ratio": round(medians[0] / medians[50], 4),
    }  # fmt: skip


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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cases = ["throughput"] if options.throughput else options.precision
        for case in cases:
            if options.throughput:
                row = throughput(folder, options.steps, options.repeats)
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
