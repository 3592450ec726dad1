"""Run `lightning fit` on the configuration of a short training in a process that can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks import ROOT
from fakes.processes.ranks import meeting_point
from fakes.runs.kill_phases import tell_phases
from lightning_aigc.cli import main as command

CONFIGS = ROOT / "configs"
DEMO, WHOLE_DEMO = CONFIGS / "sd_lora_demo.yaml", CONFIGS / "sd_full_demo.yaml"
PROMPTS = ["a zorp umbrella", "a zorp teapot"]
GUARD = {"prompts": PROMPTS, "num_images": 1, "stop": False, "min_delta": 0.0, "clip_model": "embedded:clip"}


def write_config(
    folder: Path, steps: int, precision: str, ranks: int, every: int, *, pictures: bool = False,
    base: str | None = None, sharded: str | None = None,
) -> Path:  # fmt: skip
    """Write the demo's config with few steps and images, a snapshot every `every` steps, and the base in format `base`.

    Args: sharded: zero_1, zero_2 or zero_3 for full fine-tuning under that strategy.
    """
    config: dict[str, Any] = yaml.safe_load((WHOLE_DEMO if sharded else DEMO).read_text(encoding="utf-8"))
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
        sparse = {"class_path": "NPUSparseStrategy", "init_args": {"process_group_backend": "gloo"}}
        config["trainer"] |= {"devices": ranks, "strategy": sharded or sparse}
    config["model"]["init_args"] |= {
        "max_train_steps": steps, "validation_prompts": PROMPTS if pictures else [], "num_validation_images": 1,
        "validation_steps": max(1, steps // 2 + 1), "num_inference_steps": 4,
        "checkpointing_steps": every or 50,
        "checkpoints_total_limit": 3 if every else 0,
        "lr_warmup_steps": 2,
    }  # fmt: skip
    if not sharded:
        lora = {"rank": 4, "lora_targets": ["attention"], "lora_dropout": 0.1, "base_quantization": base}
        config["model"]["init_args"] |= lora
    # Without class images an epoch is so short that kills also hit its end.
    config["data"]["init_args"] |= {
        "train_batch_size": 4, "random_flip": True, "class_data_dir": None, "cache_dir": str(folder / "cache"),
        "num_workers": 0,
    }  # fmt: skip
    path = folder / f"{precision}-{ranks}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Run:
    """One `lightning fit --resume`, one process per rank."""

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
        """Wait for the ranks. Returns: True if all of them ended with exit code 0."""
        deadline = time.monotonic() + timeout_s
        while not self.is_over() and time.monotonic() < deadline:
            time.sleep(0.01)
        ended = self.is_over()
        if not ended:
            self.kill([pid for pid in self.pids if pid not in self.codes])
            while not self.is_over():
                time.sleep(0.01)
        self.log.close()
        self._meeting = meeting_point()  # drop the previous store
        return ended and not any(self.codes.values())


def log_of(root: Path) -> str:
    return root.with_name(f"{root.name}.log").read_text()[-3000:]
