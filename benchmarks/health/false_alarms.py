"""Count the warnings and errors that GradientHealthMonitor raises on healthy trainings; the target is none.

    OMP_NUM_THREADS=1 python -m benchmarks.health.false_alarms                     # ten of Stable Diffusion, 500 steps
    OMP_NUM_THREADS=1 python -m benchmarks.health.false_alarms --only 3 --steps 100
    OMP_NUM_THREADS=1 python -m benchmarks.health.false_alarms --kinds --seeds 1 2  # fifty of other kinds

With --kinds: the trainings of tests/fakes/healthy (MLPs, ResNets, LSTMs, transformers, GANs, memorising models and
others), one row per kind and seed; the checks were developed on seeds 0 and 1. Without: LoRA and full fine-tuning of
the embedded tiny Stable Diffusion on its brand images, at several learning rates, in float32, bfloat16 and float16.
All use the monitor's defaults. Prints one JSON row per run and appends it to its file: alerts by level and check, and
the first and last loss (means of 50 steps, 20 with --kinds), which show that the run learned. Needs no network; about
15 minutes on one core, 2 per seed with --kinds.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

import lightning_aigc
from benchmarks import RESULTS
from benchmarks.common.rows import keep_row
from fakes.healthy import KINDS, Kind, fit_healthy
from lightning_aigc.callbacks import GradientHealthMonitor
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA
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


class FullFineTune(DiffusionLoRA):
    """DiffusionLoRA that trains every weight of the U-Net and has no LoRA."""

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


class LoRA(DiffusionLoRA):
    def configure_callbacks(self) -> list[Callback]:
        return []


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def run(number: int, case: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    seed_everything(number, verbose=False)
    options: dict[str, Any] = {
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
    about = {"run": number, "case": case, "steps": trainer.global_step}
    return about | report(monitor, losses.losses, seconds, 50)


def run_kind(kind: Kind, seed: int) -> dict[str, Any]:
    """Run one healthy training of another kind."""
    monitor, start = GradientHealthMonitor(page=False), time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        losses = fit_healthy(kind, seed, [monitor], Path(root))
    about = {"kind": kind.name, "seed": seed, "steps": kind.steps}
    return about | report(monitor, losses, time.perf_counter() - start, 20)


def report(monitor: GradientHealthMonitor, losses: list[float], seconds: float, window: int) -> dict[str, Any]:
    """Row of a run: its alerts, and the means of the first and last losses, which show that it learned."""
    level = collections.Counter(alert.level for alert in monitor.alerts)
    return {
        "warnings": level["warning"],
        "errors": level["error"],
        "infos": level["info"],
        "infos_by_check": dict(collections.Counter(a.check for a in monitor.alerts if a.level == "info")),
        "alerts": [f"{a.check} {a.layer} step {a.step}: {a.message}" for a in monitor.alerts if a.level != "info"][:20],
        "first_loss": float(f"{statistics.fmean(losses[:window]):.4g}"),
        "last_loss": float(f"{statistics.fmean(losses[-window:]):.4g}"),
        "seconds": round(seconds, 1),
        "versions": {m.__name__: m.__version__ for m in (torch, lightning.pytorch)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the runs to do, from 0")
    parser.add_argument("--cache", default=None, help="folder of the latent cache")
    parser.add_argument("--pages", type=Path, help="keep the runs' health.html here")
    parser.add_argument("--verbose", action="store_true", help="print every alert, infos too")
    parser.add_argument("--output", type=Path, default=RESULTS / "health" / "false_alarms.jsonl")
    parser.add_argument("--kinds", action="store_true", help="trainings of other models (tests/fakes/healthy)")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    chosen = [n for n in range(len(KINDS if given.kinds else RUNS)) if given.only is None or n in given.only]
    for seed in given.seeds if given.kinds else [0]:
        for number in chosen:
            row = run_kind(KINDS[number], seed) if given.kinds else run(number, RUNS[number], given)
            keep_row(row, given.output)


if __name__ == "__main__":
    main()
