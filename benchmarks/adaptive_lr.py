"""AdaptiveLR beside the fixed schedule, Prodigy and schedule-free AdamW: scores, and steps to the same score.

The embedded tiny Stable Diffusion learns its brand as in configs/sd_lora_demo.yaml (300 steps, cosine, 10 steps of
warm-up, the same LoRA and data) with batches of four in place of sixteen. The config's learning rate is taken 1, 3, 10
and 30 times; five seeds. Every 20 steps 18 pictures of three things that no brand picture shows are scored by CLIP-T,
at the end 48. A run whose score has fallen below where it began after step 60 is ended there and counted as diverged.

    OMP_NUM_THREADS=1 python benchmarks/adaptive_lr.py                      # all rows that are not there yet
    OMP_NUM_THREADS=1 python benchmarks/adaptive_lr.py --methods fixed --seeds 0 1
    python benchmarks/adaptive_lr.py --table                                # what the rows say

Appends one JSON row a run to benchmarks/results/adaptive_lr.jsonl. Needs no network; about 70 s a run on one core.
"""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import argparse
import json
import logging
import math
import statistics
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_aigc.callbacks.undisturbed import undisturbed
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.metrics import CLIPSimilarity

RESULTS = Path(__file__).parent / "results" / "adaptive_lr.jsonl"
PROMPTS = ["a zorp umbrella", "a zorp teapot", "a zorp guitar"]  # things that no picture of the brand shows
RATE, STEPS, EVERY = 1e-3, 300, 20
TIMES = (1, 3, 10, 30)
METHODS: dict[str, dict[str, Any]] = {
    "fixed": {"times": TIMES},
    "adaptive": {"times": TIMES},
    "prodigy": {"times": (1,)},
    "schedule_free": {"times": TIMES[:2]},
}


class Brand(StableDiffusionLoRA):
    def configure_callbacks(self) -> list[Callback]:
        return []


class Score(Callback):
    """CLIP-T of the same pictures every `EVERY` steps, without a trace in the training."""

    def __init__(self, judge: CLIPSimilarity) -> None:
        self.judge = judge
        self.curve: list[tuple[int, float]] = []
        self.final = math.nan
        self.diverged = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step % EVERY == 0:
            self._look(trainer, pl_module)
            self.diverged = trainer.global_step >= 60 and not self.curve[-1][1] >= self.curve[0][1]
            trainer.should_stop = trainer.should_stop or self.diverged

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.final = self._score(pl_module, 16)

    def _look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.curve.append((trainer.global_step, round(self._score(pl_module, 6), 4)))

    def _score(self, module: LightningModule, each: int) -> float:
        prompts = [prompt for prompt in PROMPTS for _ in range(each)]
        seeds = [5000 + i for _ in PROMPTS for i in range(each)]
        with undisturbed(module, module.device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a diverged run's pictures are black
            images = module.sample(prompts, seeds, num_inference_steps=8, batch_size=24)  # type: ignore[operator]
            return float(self.judge.scores(images.nan_to_num(0.0), prompts)["clip_t"].mean())


def run(method: str, times: float, seed: int, judge: CLIPSimilarity, folder: str, batch: int) -> dict[str, Any]:
    seed_everything(seed, verbose=False)
    arguments: dict[str, Any] = {"learning_rate": RATE * times, "lr_scheduler": "cosine", "lr_warmup_steps": 10}
    callbacks: list[Callback] = []
    if method == "adaptive":
        from lightning_aigc.callbacks import AdaptiveLR

        callbacks.append(AdaptiveLR())
    if method == "prodigy":
        from prodigyopt import Prodigy

        arguments |= {"optimizer": lambda p: Prodigy(p, lr=1.0, safeguard_warmup=True, use_bias_correction=True)}
        arguments |= {"learning_rate": 1.0, "lr_warmup_steps": 0}
    if method == "schedule_free":
        from schedulefree import AdamWScheduleFree

        arguments |= {"optimizer": lambda p: AdamWScheduleFree(p, warmup_steps=10), "lr_warmup_steps": 0}
        arguments |= {"lr_scheduler": "constant"}
    module = Brand(
        "embedded:sd",
        rank=16,
        lora_targets=["attention", "feed_forward", "convolutions"],
        max_train_steps=STEPS,
        snr_gamma=5.0,
        use_ema=method != "schedule_free",  # that one has an average of its own
        ema_decay=0.98,
        guidance_scale=3.0,
        **arguments,
    )
    data = ImageCaptionData(
        "embedded:brand",
        class_data_dir="embedded:prior",
        prior_ratio=0.5,
        resolution=64,
        train_batch_size=batch,
        trigger_word="zorp",
        caption_dropout_rate=0.05,
        cache_latents=True,
        cache_text_embeddings=True,
        cache_dir=folder,
        num_workers=0,
        seed=seed,
    )
    score = Score(judge)
    trainer = Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[*callbacks, score],
        default_root_dir=folder,
    )
    started = time.perf_counter()
    trainer.fit(module, data)
    row = {
        "method": method,
        "batch": batch,
        "times": times,
        "seed": seed,
        "final": round(score.final, 4),
        "diverged": score.diverged,
    }
    row |= {"curve": score.curve, "seconds": round(time.perf_counter() - started)}
    if method == "adaptive":
        row["changes"] = [[c.step, round(c.factor, 3), c.reason] for c in callbacks[0].changes]  # type: ignore[attr-defined]
    versions = {"date": str(date.today()), "device": "cpu", "torch": torch.__version__}
    return row | versions | {"lightning": lightning.__version__}


def first_step_at(curve: list[list[float]], score: float) -> float:
    """The first check that reached it; infinite if none did."""
    return next((step for step, reached in curve if reached >= score), math.inf)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Scores and steps of every row, the steps to the best score of the fixed schedule at the config's rate."""
    by = {(row["method"], row["times"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    goals = {seed: max(s for _, s in by["fixed", 1, seed]["curve"]) for seed in seeds if ("fixed", 1, seed) in by}
    print("| method | rate x | final score of each seed | mean | diverged | steps to the goal | median |")
    print("|---|---|---|---|---|---|---|")
    for method, spec in METHODS.items():
        for times in spec["times"]:
            found = [by[method, times, seed] for seed in seeds if (method, times, seed) in by]
            if not found:
                continue
            finals = [row["final"] for row in found]
            steps = [first_step_at(row["curve"], goals[row["seed"]]) for row in found if row["seed"] in goals]
            print(
                f"| {method} | {times} | {' '.join(f'{f:.3f}' for f in finals)} | {statistics.mean(finals):.3f} "
                f"| {sum(row['diverged'] for row in found)} of {len(found)} "
                f"| {' '.join('-' if math.isinf(s) else str(int(s)) for s in steps)} "
                f"| {statistics.median(steps) if steps else math.nan:g} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--times", nargs="+", type=float, help="only these multiples of the config's rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--table", action="store_true", help="print what the rows say and run nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.output.read_text().splitlines()] if options.output.exists() else []
    rows = [row for row in rows if row.get("batch", 4) == options.batch]
    if options.table:
        print_table([row for row in rows if row["seed"] in options.seeds])
        return
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    judge = CLIPSimilarity("embedded:clip")
    judge.check()
    done = {(row["method"], row["times"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder:  # one cache for all
        for method in options.methods:
            for times in METHODS[method]["times"]:
                if options.times and times not in options.times:
                    continue
                for seed in options.seeds:
                    if (method, times, seed) in done:
                        continue
                    row = run(method, times, seed, judge, folder, options.batch)
                    print(json.dumps(row), flush=True)
                    with options.output.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
