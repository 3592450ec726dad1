"""A run that is killed after its last step finishes with `--resume`; one that is finished is left as it is."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from fakes.processes.ranks import forking_context
from fakes.runs.kill_phases import ENDING, everything_in, tell_phases, told
from lightning_aigc.checkpoint import find_snapshots
from lightning_aigc.cli import main

Command = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def scored(quick_config: dict[str, Any], tmp_path: Path) -> Path:
    """Three steps, snapshots after the second and the last, and an end that draws, scores and writes all there is."""
    config = quick_config
    config["trainer"] |= {"default_root_dir": str(tmp_path / "run"), "enable_progress_bar": False, "logger": False}
    report, words = config["trainer"]["callbacks"][0], ["a zorp cup", "a zorp shoe"]
    report["init_args"] |= {"clip_model": "embedded:clip", "num_images": 2, "prompts": words, "prior_prompts": []}
    guard = {"prompts": words, "every_n_steps": 2, "num_images": 1, "min_delta": 0.0, "seed": 3}
    guard["clip_model"] = "embedded:clip"
    config["trainer"]["callbacks"].append({"class_path": "CLIPConvergenceGuard", "init_args": guard})
    config["model"]["init_args"] |= {
        "max_train_steps": 3, "checkpointing_steps": 2, "validation_steps": 2, "learning_rate": 0.01,
    }  # fmt: skip
    path = tmp_path / "scored.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def fit_and_tell(arguments: list[str], where: str, log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    torch.set_num_threads(1)
    sys.argv = ["lightning"]
    tell_phases(Path(where))
    main(arguments)


def kill_in(phase: str, arguments: list[str], folder: Path) -> None:
    """Start a fit and send it SIGKILL as soon as the phase has begun."""
    where, log = folder / f"told-{len(list(folder.glob('told-*')))}", folder / "log.txt"
    process = forking_context().Process(target=fit_and_tell, args=(arguments, str(where), str(log)), daemon=True)
    process.start()
    deadline = time.monotonic() + 120
    while phase not in told(where):
        assert process.is_alive() and time.monotonic() < deadline, f"no {phase}: {log.read_text()[-3000:]}"
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -9


def results(root: Path) -> dict[str, Any]:
    """A run's results that name neither a time nor its own place."""
    summary = json.loads((root / "summary.json").read_text())
    for key in ("seconds", "steps_a_second", "peak_memory_mib", "lora_file", "report"):
        assert summary.pop(key)
    sheets = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.png")}
    assert {"samples/step_000003.png", "guard/step_000003.png", "guard/before_after.png"} <= sheets.keys()
    assert (root / "report.html").stat().st_size > 5000
    return {"summary": summary} | sheets


@pytest.mark.long
@pytest.mark.parametrize("phases", [("scoring", "LoRA file", "report"), ("drawing", "sheet", "LoRA", "mark")])
def test_a_kill_in_each_part_of_the_ending_loses_nothing(
    command: Command, scored: Path, tmp_path: Path, phases: tuple[str, ...]
) -> None:
    whole, root = tmp_path / "whole", tmp_path / "run"
    assert command("fit", "-c", scored, f"--trainer.default_root_dir={whole}").code == 0
    words = ["fit", "-c", str(scored)]
    for phase in phases:
        kill_in(ENDING + phase, words, tmp_path)
        (last, *_) = find_snapshots(root / "snapshots")
        assert phase == "mark" or "is_finished" not in last.facts
        words = ["fit", "-c", str(scored), "--resume"]
    said = command(*words)
    assert said.code == 0, said.err
    assert results(root) == results(whole)
    for name in ("zorp.safetensors", "zorp_best.safetensors"):
        one, other = load_file(whole / name), load_file(root / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert find_snapshots(root / "snapshots")[0].facts["is_finished"]


def test_a_finished_run_says_so_in_one_line_and_changes_nothing(
    command: Command, scored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    logged = ["--trainer.logger=true"]
    assert command("fit", "-c", scored, *logged).code == 0
    before = everything_in(root)
    with caplog.at_level("INFO"):
        assert command("fit", "-c", scored, *logged, "--resume").code == 0
    assert everything_in(root) == before
    assert [line for line in caplog.messages if line.startswith("the run in")] == [
        f"the run in {root} is finished: 3 steps, and its files are written; nothing to do (a larger"
        " max_train_steps, max_steps or max_epochs continues from its end)"
    ]
    # A file that is gone is written again, and a larger limit continues.
    lora = load_file(root / "zorp.safetensors")
    (root / "zorp.safetensors").unlink()
    assert command("fit", "-c", scored, *logged, "--resume").code == 0
    again = load_file(root / "zorp.safetensors")
    assert all(torch.equal(lora[key], again[key]) for key in lora)
    assert command("fit", "-c", scored, "--resume", "--model.init_args.max_train_steps=4").code == 0
    assert json.loads((root / "summary.json").read_text())["steps"] == 4
