"""The monitor, the guard and the adaptive rate beside each other and beside everything else that a run has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file

from fakes.models.denoisers import LeanSD, fit, sd_batches
from lightning_aigc.callbacks import AdaptiveLR, CLIPConvergenceGuard, GradientHealthMonitor
from lightning_aigc.precision import FusedBackwardPrecision

DEMO = Path(__file__).parents[1] / "configs" / "sd_lora_demo.yaml"
PROMPTS = ["a zorp mug", "a zorp bottle"]
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on loaders and eval mode
]


def the_three(folder: Path) -> list[Callback]:
    watching = CLIPConvergenceGuard(PROMPTS, 4, 1, clip_model="embedded:clip", directory=str(folder / "guard"))
    return [GradientHealthMonitor(dirpath=str(folder), on_error="skip_step"), watching, AdaptiveLR()]


def train(folder: Path, callbacks: list[Callback], **given: Any) -> list[torch.Tensor]:
    module = LeanSD("embedded:sd", rank=4, learning_rate=1e-3, use_ema=True, num_inference_steps=2, guidance_scale=2.0)
    plugin = FusedBackwardPrecision("bf16-mixed", memory="lean")
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "default_root_dir": folder} | given
    fit(module, callbacks, steps=8, data=sd_batches(4), plugins=[plugin], enable_checkpointing=True, **options)
    assert module.ema is not None
    return [p.detach().clone() for p in (*module.trainable_parameters(), *module.ema.shadow_params)]


def test_in_any_order_they_leave_the_same_weights_and_states(tmp_path: Path) -> None:
    found = []
    for number, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 2, 0)]):
        folder = tmp_path / str(number)
        callbacks = the_three(folder)
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4)
        ordered = [callbacks[place] for place in order]
        weights = train(folder, [*ordered[:2], saver, ordered[2]])
        adaptive = callbacks[2]
        assert isinstance(adaptive, AdaptiveLR)
        state = torch.load(next(folder.glob("step=*.ckpt")), weights_only=True)["callbacks"]
        assert {name.split("{")[0] for name in state} >= {"GradientHealthMonitor", "CLIPConvergenceGuard", "AdaptiveLR"}
        found.append((weights, adaptive.changes, (folder / "health.jsonl").read_text()))
    alone = AdaptiveLR()
    weights = train(tmp_path / "alone", [alone, ModelCheckpoint(tmp_path / "alone")])
    for others, changes, said in found:
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))  # the other two only look
        assert changes == alone.changes
        assert said == found[0][2]


def run_cli(config: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_aigc", "fit", "-c", str(DEMO), "-c", str(config), *arguments],
        capture_output=True,
        text=True,
        cwd=config.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_from_yaml_on_two_ranks_with_npu_sparse_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    guard = {"prompts": PROMPTS, "every_n_steps": 4, "num_images": 1, "clip_model": "embedded:clip"}
    callbacks = [
        {"class_path": "AdaptiveLR"},
        {"class_path": "ExactSnapshot", "init_args": {"every_n_steps": 4}},
        {"class_path": "CLIPConvergenceGuard", "init_args": guard},
        {"class_path": "GradientHealthMonitor"},
    ]
    strategy = {"class_path": "NPUSparseStrategy", "init_args": {"process_group_backend": "gloo"}}
    trainer = {"callbacks": callbacks, "strategy": strategy, "devices": 2, "accumulate_grad_batches": 2}
    model = {"max_train_steps": None, "lr_scheduler": "constant", "validation_prompts": [], "num_inference_steps": 2}
    data = {"train_batch_size": 2, "cache_dir": str(tmp_path / "cache"), "num_workers": 0, "class_data_dir": None}
    config = tmp_path / "together.yaml"
    config.write_text(yaml.safe_dump({"trainer": trainer, "model": {"init_args": model}, "data": {"init_args": data}}))
    results = {}
    for name, calls in {"whole": [(8, ())], "resumed": [(4, ()), (8, ("--resume",))]}.items():
        for steps, more in calls:
            said = run_cli(
                config, f"--trainer.max_steps={steps}", f"--trainer.default_root_dir={tmp_path / name}", *more
            )
        assert "npu_sparse" in said
        health = [json.loads(line) for line in (tmp_path / name / "health.jsonl").read_text().splitlines()]
        results[name] = load_file(tmp_path / name / "zorp.safetensors"), health
    (weights, health), (again, health_again) = results["whole"], results["resumed"]
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert health == health_again
