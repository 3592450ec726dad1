"""The console of a run, line by line, and lines about settings that no one wants."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.utilities import rank_zero_warn

from lightning_aigc.cli.fit.console import format_warning
from lightning_aigc.cli.fit.start_lines import USUAL, strange_rates
from lightning_aigc.cli.fit.trainer_commands import run_trainer_verb

ALWAYS = (
    r"Seed set to 42",
    r"GPU available: (True|False), used: False",
    r"data: ",
    r"  (images|captions|epoch|cache|advice|loader|note) +\S",
    r"  +(bucket|\d+ x \d+) ",
    r"  advice$",
    r"    \S",  # of the advice
    r"cache: latents \d+ ready, \d+ encoded now",
    r"encoding (images|captions): +\d+%",
)
OF_A_TRAINING = (
    r"2 processes, joined by gloo",
    r"run: \S+ \(images in samples/, scored images in guard/, open \S+/run/report.html, which renews itself\)",
    r"live: tensorboard --logdir ",
    r"model: [\d.]+ [kM] of [\d.]+ [kM] parameters are trained",
    r"warning: (learning rate: 0.02 is above|1 of 2 validation_prompts have more than 10 tokens)",
    r"training: +\d+%",
    r"CLIPConvergenceGuard checks only the start and the end of these 2 steps, because",
    r"CLIPConvergenceGuard: training ended; best clip_t ",
    r"(verdict|steps|time|peak memory|LoRA|report) +\S",
)
OF_A_DRY_RUN = (
    r"trainable parameters: ",
    r"memory estimate: ",
    r"learning rate: 0.02 is above",
    r"1 of 2 validation_prompts have more than 10 tokens",
    r"autoencoder: ",
    r"one step: ",
    r"loss: ",
    r"dry run: ",
)
SAID_ONCE = (
    "learning rate: 0.02 is above what AdamW takes",
    "1 of 2 validation_prompts have more than 10 tokens",
    "1 of 2 prompts lack the trigger word zorp (such as 'a cup')",
)


@pytest.mark.long
def test_each_line_of_a_run_is_a_fact_that_is_said_once(quick_config: dict[str, Any], tmp_path: Path) -> None:
    quick_config["trainer"]["default_root_dir"] = str(tmp_path / "run")
    del quick_config["data"]["init_args"]["prior_ratio"]  # without class images it changes nothing, which a note says
    guard = {"every_n_steps": 2, "num_images": 1, "clip_model": "embedded:clip"}
    quick_config["trainer"]["callbacks"].append({"class_path": "CLIPConvergenceGuard", "init_args": guard})
    prompts = ["a zorp cup" + " on a table" * 40, "a cup"]
    quick_config["model"]["init_args"] |= {"learning_rate": 0.02, "validation_prompts": prompts}
    quick_config["data"]["init_args"]["train_batch_size"] = 16
    (tmp_path / "loud.yaml").write_text(yaml.safe_dump(quick_config))
    words = [sys.executable, "-m", "lightning_aigc", "fit", "-c", "loud.yaml"]
    kinds = (
        (["--trainer.devices=2"], OF_A_TRAINING, "16 images on each of 2 devices"),
        (["--dry_run"], OF_A_DRY_RUN, "16 images"),
    )
    for more, of_its_kind, images in kinds:
        done = subprocess.run([*words, *more], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line for line in re.split(r"[\n\r]", done.stdout + done.stderr) if line.strip()]
        known = (*ALWAYS, *of_its_kind)
        assert [line for line in lines if not any(re.match(pattern, line) for pattern in known)] == []
        facts = [line for line in lines if not line.startswith(("training: ", "encoding "))]
        assert len(facts) == len(set(facts))
        for sentence in (*SAID_ONCE, f"a batch takes {images} and an epoch has 6"):
            assert sum(sentence in line for line in lines) == 1, sentence
        if of_its_kind is OF_A_TRAINING:
            rate = done.stderr.index("learning rate: 0.02")
            assert rate < done.stderr.index("training: "), "before the first step"


def test_a_warning_is_its_text_and_the_package_of_another() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank_zero_warn("first\n  second")
    (warning,) = caught
    ours = "/x/site-packages/lightning_aigc/callbacks/harm.py"
    assert format_warning(warning.message, warning.category, ours, 3) == "warning: first second\n"
    theirs = "/x/site-packages/torch/nn/modules/conv.py"
    assert format_warning(warning.message, warning.category, theirs, 3) == "warning of torch: first second\n"
    assert format_warning("text", UserWarning, "/home/me/mine.py", 3) == "warning of mine: text\n"


class _Named:
    def __init__(self, rate: float) -> None:
        self.param_groups = [{"lr": 0.0, "initial_lr": rate}, {"lr": 0.0, "initial_lr": rate}]


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "SGD", "Lion8bit", "Muon", "AdamW", "AdamW8bit"])
def test_each_optimizer_has_its_own_usual_rates(name: str) -> None:
    least, most, usual = next(limits for begin, limits in USUAL.items() if name.startswith(begin))
    kind = type(name, (_Named,), {})
    assert list(strange_rates([kind(usual), kind(least), kind(most)])) == []
    below, above = strange_rates([kind(least / 2), kind(most * 2)])
    assert f"is below what {name} takes" in below and f"is above what {name} takes" in above
    assert f"set model.init_args.learning_rate to {usual:g}" in above


def test_calls_to_a_store_that_has_ended_print_no_frames_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert run_trainer_verb(["fit", "-c", "nowhere.yaml"]) == 2
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"  # the user's own
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    assert run_trainer_verb(["fit", "-c", "nowhere.yaml"]) == 2
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
