"""The two jobs of article_table.py, and the settings that both sides share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion.families.unet_lora import LoRATarget, unet_lora_config

WARMUP_STEPS, SNR_GAMMA, MAX_GRAD_NORM, EMA_DECAY = 10, 5.0, 1.0, 0.98
TARGETS: tuple[LoRATarget, ...] = ("attention", "feed_forward", "convolutions")

FEW_STEPS = 30
"""Trainings with fewer steps only check that everything runs."""


@dataclass(frozen=True)
class Job:
    """Trained weights, steps and intervals of a job. On two ranks the demo's batch of 16 is 8 per rank."""

    name: str
    is_full: bool
    learning_rate: float
    steps: int = 200
    batch: int = 8
    rank: int = 16
    snapshot_steps: int = 50
    guard_steps: int = 50
    guard_images: int = 4
    guard_patience: int = 100
    score_steps: int = 30
    score_images: int = 12

    def lora(self) -> Any:
        """peft config of the LoRA."""
        return unet_lora_config(TARGETS, self.rank, float(self.rank))

    def of(self, steps: int) -> Job:
        """The job with `steps` steps; short runs get smaller batches, fewer images and shorter intervals."""
        if steps >= FEW_STEPS:
            return replace(self, steps=steps)
        few = replace(self, steps=steps, batch=2, guard_images=1, score_images=1)
        return replace(few, snapshot_steps=4, guard_steps=4, score_steps=6)


JOBS = {"full": Job("full", is_full=True, learning_rate=1e-4), "lora": Job("lora", is_full=False, learning_rate=1e-3)}


def brand_pictures(job: Job, seed: int, folder: Path, *, is_cached: bool) -> ImageCaptionData:
    """The demo's data with empty caches in `folder`, without caption dropout, which diffusers' script does not have."""
    return ImageCaptionData(
        "embedded:brand",
        class_data_dir="embedded:prior",
        prior_ratio=0.5,
        resolution=64,
        train_batch_size=job.batch,
        trigger_word="zorp",
        cache_latents=is_cached,
        cache_text_embeddings=is_cached,
        cache_dir=str(folder / "cache"),
        num_workers=0,
        seed=seed,
    )
