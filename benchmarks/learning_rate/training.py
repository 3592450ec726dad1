"""One training of adaptive_lr.py: settings, scores during training, and the result row."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from diffusers.training_utils import EMAModel
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_aigc.callbacks import AdaptiveLR
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.metrics import CLIPSimilarity
from lightning_aigc.rng import isolate_rng

PROMPTS = ["a zorp umbrella", "a zorp teapot", "a zorp guitar"]  # objects that no brand image shows
STEPS = 300
CHECKS = (60, 150)
"""Steps at which a diverged run is stopped."""


@dataclass(frozen=True)
class Setting:
    """Trained weights, batch size, and the rate at `times` 1."""

    batch: int
    rate: float
    is_full: bool = False


SETTINGS = {
    "lora-16": Setting(16, 1e-3),
    "full-4": Setting(4, 1e-4, is_full=True),
    "lora-4": Setting(4, 1e-3),
    "lora-1": Setting(1, 1e-3),
}
"""Longest runs first, so that the last runs of a seed are short."""


@dataclass(frozen=True)
class Cell:
    """One training."""

    setting: str
    times: float
    seed: int
    variant: str

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Cell:
        return cls(row["setting"], float(row["times"]), int(row["seed"]), row["variant"])


class Brand(DiffusionLoRA):
    def configure_callbacks(self) -> list[Callback]:
        return []


class FullBrand(Brand):
    """DiffusionLoRA that trains every weight of the U-Net and has no LoRA."""

    def configure_model(self) -> None:
        if self.unet is not None:
            return
        ema, self.args.use_ema = self.args.use_ema, False
        super().configure_model()
        self.args.use_ema = ema
        assert self.unet is not None
        self.unet.delete_adapters("default")
        self.unet.requires_grad_(True)
        if ema:
            self.ema = EMAModel(
                self.trainable_parameters(), decay=self.args.ema_decay, use_ema_warmup=True, power=3 / 4
            )


class Score(Callback):
    """Score CLIP-T of fixed images at the end, at the checks and every `every` steps, without effect on the run."""

    def __init__(self, judge: CLIPSimilarity, untrained: float, every: int) -> None:
        self.judge, self.untrained, self.every = judge, untrained, every
        self.curve: list[tuple[int, float]] = []
        self.losses: list[float] = []
        self.final = math.nan
        self.ended_at: int | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        step = trainer.global_step
        if step in CHECKS or (self.every and step % self.every == 0):
            self.curve.append((step, round(self.score(pl_module, 6 if self.every else 3), 4)))
            if step in CHECKS and not self.curve[-1][1] >= self.untrained:
                self.ended_at = step
                trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.final = self.score(pl_module, 16)

    def score(self, module: LightningModule, each: int) -> float:
        """Mean CLIP-T over `each` images per prompt."""
        prompts = [prompt for prompt in PROMPTS for _ in range(each)]
        seeds = [5000 + i for _ in PROMPTS for i in range(each)]
        with isolate_rng(module.device), evaluating(module), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a diverged run samples black images
            images = module.sample(prompts, seeds, num_inference_steps=8, batch_size=24)  # type: ignore[operator]
            return float(self.judge.scores(images.nan_to_num(0.0), prompts)["clip_t"].mean())


def brand_pictures(setting: Setting, seed: int, folder: str) -> ImageCaptionData:
    """Data of the demo, with both caches in `folder`."""
    return ImageCaptionData(
        "embedded:brand",
        class_data_dir="embedded:prior" if setting.batch > 1 else None,  # one item cannot be brand and class
        prior_ratio=0.5,
        resolution=64,
        train_batch_size=setting.batch,
        trigger_word="zorp",
        caption_dropout_rate=0.05,
        cache_latents=True,
        cache_text_embeddings=True,
        cache_dir=folder,
        num_workers=0,
        seed=seed,
    )


def make_trainer(folder: str, device: str, steps: int, callbacks: list[Callback]) -> Trainer:
    """Trainer on one device that writes no files except those of its callbacks."""
    return Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        default_root_dir=folder,
    )


def train(
    cell: Cell,
    judge: CLIPSimilarity,
    folder: str,
    device: str = "cpu",
    untrained: float = -math.inf,
    every: int = 0,
    steps: int = STEPS,
    scored_by: type[Score] = Score,
) -> dict[str, Any]:
    """Run one cell. Returns: its row."""
    seed_everything(cell.seed, verbose=False)
    setting = SETTINGS[cell.setting]
    arguments: dict[str, Any] = {"lr_scheduler": "cosine", "lr_warmup_steps": 10}
    arguments["learning_rate"] = setting.rate * cell.times
    callbacks: list[Callback] = []
    adaptive: AdaptiveLR | None = None
    if cell.variant == "adaptive":
        adaptive = AdaptiveLR()
        callbacks.append(adaptive)
    if cell.variant == "prodigy":
        from prodigyopt import Prodigy

        arguments |= {"optimizer": lambda p: Prodigy(p, lr=1.0, safeguard_warmup=True, use_bias_correction=True)}
        arguments |= {"learning_rate": 1.0, "lr_warmup_steps": 0}
    if cell.variant == "schedule_free":
        from schedulefree import AdamWScheduleFree

        arguments |= {"optimizer": lambda p: AdamWScheduleFree(p, warmup_steps=10), "lr_warmup_steps": 0}
        arguments |= {"lr_scheduler": "constant"}
    module = (FullBrand if setting.is_full else Brand)(
        "embedded:sd",
        rank=16,
        lora_targets=["attention", "feed_forward", "convolutions"],
        max_train_steps=STEPS,
        snr_gamma=5.0,
        use_ema=cell.variant != "schedule_free",  # schedule-free averages by itself
        ema_decay=0.98,
        guidance_scale=3.0,
        **arguments,
    )
    data = brand_pictures(setting, cell.seed, folder)
    score = scored_by(judge, untrained, every)
    trainer = make_trainer(folder, device, steps, [*callbacks, score])
    started = time.perf_counter()
    trainer.fit(module, data)
    row = {"setting": cell.setting, "times": cell.times, "seed": cell.seed, "variant": cell.variant}
    row |= {"rate": setting.rate * cell.times, "final": round(score.final, 4), "ended_at": score.ended_at}
    row |= {"last_loss": round(statistics.mean(score.losses[-50:]), 4), "curve": score.curve}
    if adaptive is not None:
        row["changes"] = [[c.step, round(c.factor, 4), c.reason] for c in adaptive.changes]
    row |= {"seconds": round(time.perf_counter() - started, 1), "device": device}
    return row | {"torch": torch.__version__, "lightning": lightning.__version__}
