"""Short runs of the shipped configs on tiny pipelines, and digests of what they compute and save.

To write tests/golden.json anew, where a change of these numbers is intended:

    PYTHONPATH=tests python -c "import lightning_aigc; from fakes.runs.golden_runs import write; write()"
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image
from safetensors import safe_open

from fakes.models.transformer_pipelines import MAKE
from lightning_aigc.cli import main

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith("edit_"))
"""Configs that train on images with captions; an edit needs pairs, and `make demo-edit` is measured by its own bars."""
GOLDEN = ROOT / "tests" / "golden.json"
STEPS = 3


class LossRecorder(Callback):
    """Write the loss of each step, as hexadecimal, to losses.json in the run's folder."""

    def __init__(self) -> None:
        self.losses: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]).hex())

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        Path(trainer.default_root_dir, "losses.json").write_text(json.dumps(self.losses), encoding="utf-8")


def machine() -> str:
    """Processor and version of torch: bits are compared between equal ones only."""
    info = Path("/proc/cpuinfo")
    names = [
        line.split(": ")[1] for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")
    ]
    return f"{names[0] if names else 'unknown'}, torch {torch.__version__}"


def family_of(config: Path) -> str | None:
    """Family of transformers that the config is for; None for U-Nets."""
    return max((name for name in MAKE if config.stem.startswith(name)), key=len, default=None)


def digest(folder: Path) -> dict[str, str]:
    """sha256 of the names, dtypes, shapes and bytes of all tensors of each result file."""
    return {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("mug*.safetensors"))}


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found.update(str(sorted(file.metadata() or {})).encode())
    return found.hexdigest()


def work_of(config: Path) -> str:
    """Everything that `run_config` does not replace in the config; configs with equal work are trained alike."""
    given = yaml.safe_load(config.read_text(encoding="utf-8"))
    trainer = given["trainer"]
    for key in ("accelerator", "devices", "num_nodes", "default_root_dir", "logger", "callbacks"):
        trainer.pop(key, None)
    if not isinstance(trainer.get("strategy"), dict):
        trainer.pop("strategy", None)
    return json.dumps([family_of(config), given], sort_keys=True)


def run_config(config: Path, folder: Path, base: str, accelerator: str = "cpu") -> dict[str, Any]:
    """Train the config for STEPS steps on four images, then once more from the snapshot after the first step.

    Returns: losses (hexadecimal), files (sha256 by name), and resumed (the same of the second run).
    """
    images, run = folder / "images", folder / "run"
    images.mkdir()
    for number in range(4):
        pixels = torch.rand(64, 64, 3, generator=torch.Generator().manual_seed(number))
        Image.fromarray((255 * pixels).byte().numpy()).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"a zorp mug {number}")
    given = yaml.safe_load(config.read_text(encoding="utf-8"))
    strategy = given["trainer"].get("strategy", "auto")
    overlay: dict[str, Any] = {
        "threads": 1,
        "trainer": {
            "accelerator": accelerator, "devices": 1, "num_nodes": 1, "default_root_dir": str(run), "logger": False,
            "strategy": strategy if isinstance(strategy, dict) else "auto", "enable_progress_bar": False,
            "callbacks": [
                {"class_path": "ExactSnapshot", "init_args": {"every_n_steps": 1, "keep_last": 9}},
                {"class_path": "fakes.runs.golden_runs.LossRecorder"},
            ],
        },
        "model": {"init_args": {
            "pretrained_model_name_or_path": base, "validation_prompts": [], "output_name": "mug",
            "max_train_steps": STEPS, "lr_warmup_steps": 0, "num_validation_images": 1, "num_inference_steps": 2,
            "sample_resolution": 64,
        }},
        "data": {"init_args": {
            "train_data_dir": str(images), "class_data_dir": None, "resolution": 64, "trigger_word": "zorp",
            "train_batch_size": 2, "cache_dir": str(folder / "cache"), "num_workers": 0,
        }},
    }  # fmt: skip
    (folder / "mine.yaml").write_text(yaml.safe_dump(overlay))
    command = ["fit", "-c", str(config), "-c", str(folder / "mine.yaml")]
    _fit(command)
    losses, files = json.loads((run / "losses.json").read_text()), digest(run)
    for snapshot in sorted((run / "snapshots").glob("step-*"))[1:]:
        shutil.rmtree(snapshot)
    for path in run.rglob("mug*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    _fit([*command, "--resume"])
    return {"losses": losses[:STEPS], "files": files, "resumed": digest(run)}


def _fit(command: list[str]) -> None:
    """Run the command line, which exits at its end."""
    code: Any = 0
    try:
        main(command)
    except SystemExit as ended:
        code = ended.code
    assert not code, code


def write() -> None:
    """Run every config and write tests/golden.json."""
    golden: dict[str, Any] = {"machine": machine()}
    for config in CONFIGS:
        with tempfile.TemporaryDirectory() as temporary:
            folder, family = Path(temporary), family_of(config)
            base = "embedded:sd" if family is None else str(MAKE[family](folder / "pipeline"))
            golden[config.stem] = run_config(config, folder, base)
        print(config.stem, golden[config.stem]["losses"], len(golden[config.stem]["files"]), file=sys.stderr)
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
