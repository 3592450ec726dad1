"""Ten healthy trainings of 500 steps under GradientHealthMonitor: how many warnings and errors it raises. Wanted: none.

    OMP_NUM_THREADS=1 python benchmarks/health_false_alarms.py
    OMP_NUM_THREADS=1 python benchmarks/health_false_alarms.py --only 3 --steps 100

LoRA and full fine-tuning of the embedded tiny Stable Diffusion on its brand pictures, at several learning rates, in
float32, bfloat16 and float16, with the monitor's defaults. Prints one JSON row a run and appends it to
benchmarks/results/DATE-health_false_alarms.jsonl: alerts by level and check, and the first and last loss (means of 50
steps), which show that the run did learn. Needs no network; some 15 minutes on one core.
"""

from __future__ import annotations

import lightning_aigc  # first: it mends torchvision's import

# isort: split
import argparse
import collections
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_aigc.callbacks import GradientHealthMonitor
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.precision import FusedBackwardPrecision

PICTURES = str(Path(lightning_aigc.__file__).parent / "tiny" / "brand")
RUNS: list[dict[str, Any]] = [
    {"kind": "lora", "rank": 8, "learning_rate": 1e-4},
    {"kind": "lora", "rank": 16, "learning_rate": 1e-3, "lr_scheduler": "cosine", "lr_warmup_steps": 10},
    {"kind": "lora", "rank": 4, "learning_rate": 3e-3, "accumulate": 2, "batch": 2},
    {"kind": "lora", "rank": 16, "learning_rate": 1e-3, "targets": ["attention", "feed_forward", "convolutions"]},
    {"kind": "lora", "rank": 8, "learning_rate": 5e-4, "precision": "bf16-mixed", "snr_gamma": 5.0},
    {"kind": "lora", "rank": 8, "learning_rate": 1e-3, "precision": "16-mixed", "batch": 2},
    {"kind": "full", "learning_rate": 1e-5},
    {"kind": "full", "learning_rate": 1e-4, "lr_scheduler": "cosine", "lr_warmup_steps": 50},
    {"kind": "full", "learning_rate": 1e-4, "precision": "bf16-mixed", "clip": 1.0},
    {
        "kind": "full",
        "learning_rate": 3e-5,
        "precision": "bf16-forward-fp16-backward",
        "memory": "lean",
        "use_ema": True,
    },
]


class FullFineTune(StableDiffusionLoRA):
    """The same training with every weight of the U-Net, and no LoRA."""

    def configure_model(self) -> None:
        if self.unet is not None:
            return
        super().configure_model()
        assert self.unet is not None
        self.unet.unload_lora()
        self.unet.requires_grad_(True).float()
        if self.ema is not None:
            self.ema = type(self.ema)(self.trainable_parameters(), decay=0.995)

    def configure_callbacks(self) -> list[Callback]:
        return []


class LoRA(StableDiffusionLoRA):
    def configure_callbacks(self) -> list[Callback]:
        return []


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def run(number: int, case: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    seed_everything(number, verbose=False)
    options = {
        k: case[k] for k in ("learning_rate", "lr_scheduler", "lr_warmup_steps", "snr_gamma", "use_ema") if k in case
    }
    if "targets" in case:
        options["lora_targets"] = case["targets"]
    kind = FullFineTune if case["kind"] == "full" else LoRA
    module = kind("embedded:sd", rank=case.get("rank", 4), max_train_steps=given.steps, **options)
    monitor, losses = GradientHealthMonitor(), Losses()
    with tempfile.TemporaryDirectory() as root:
        data = ImageCaptionData(
            PICTURES,
            resolution=64,
            train_batch_size=case.get("batch", given.batch),
            cache_dir=given.cache,
            num_workers=0,
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            default_root_dir=root,
            plugins=[FusedBackwardPrecision(case.get("precision", "32-true"), memory=case.get("memory", "off"))],
            gradient_clip_val=case.get("clip"),
            accumulate_grad_batches=case.get("accumulate", 1),
            callbacks=[monitor, losses],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        start = time.perf_counter()
        trainer.fit(module, data)
        seconds = time.perf_counter() - start
        if given.pages:
            given.pages.mkdir(parents=True, exist_ok=True)
            (Path(root) / "health.html").rename(given.pages / f"health_{number}.html")
    for alert in monitor.alerts if given.verbose else []:
        print(alert.line())
    level = collections.Counter(alert.level for alert in monitor.alerts)
    return {
        "run": number,
        "case": case,
        "steps": trainer.global_step,
        "warnings": level["warning"],
        "errors": level["error"],
        "infos": level["info"],
        "infos_by_check": dict(collections.Counter(a.check for a in monitor.alerts if a.level == "info")),
        "alerts": [f"{a.check} {a.layer} step {a.step}: {a.message}" for a in monitor.alerts if a.level != "info"][:20],
        "first_loss": round(statistics.fmean(losses.losses[:50]), 5),
        "last_loss": round(statistics.fmean(losses.losses[-50:]), 5),
        "seconds": round(seconds, 1),
        "versions": {m.__name__: m.__version__ for m in (torch, lightning.pytorch)},
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the runs to do, from 0")
    parser.add_argument("--cache", default=None, help="folder of the latent cache")
    parser.add_argument("--pages", type=Path, help="keep the runs' health.html here")
    parser.add_argument("--verbose", action="store_true", help="print every alert, infos too")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    given.results.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(RUNS):
        if given.only is None or number in given.only:
            row = json.dumps(run(number, case, given))
            print(row, flush=True)
            path = given.results / f"{time.strftime('%Y-%m-%d')}-health_false_alarms.jsonl"
            with path.open("a", encoding="utf-8") as file:
                file.write(row + "\n")


if __name__ == "__main__":
    main()
