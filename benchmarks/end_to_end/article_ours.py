"""Our side of article_table.py: all features together, or without one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.end_to_end.article_jobs import (
    EMA_DECAY,
    MAX_GRAD_NORM,
    SNR_GAMMA,
    TARGETS,
    WARMUP_STEPS,
    Job,
    brand_pictures,
)
from benchmarks.end_to_end.article_meter import GUIDANCE, INFERENCE_STEPS, PROMPTS, Meter, Scorer, kept_by_a_step_mib
from lightning_aigc.callbacks import AdaptiveLR, CLIPConvergenceGuard, ExactSnapshot
from lightning_aigc.diffusion import DiffusionFineTuning, DiffusionLoRA, DiffusionTraining
from lightning_aigc.precision import FusedBackwardPrecision

LEFT_OUT = {
    "npu_sparse": "DDP in its place",
    "fused_backward": "float32 without FusedBackwardPrecision",
    "adaptive_lr": "the configured rate and its schedule",
    "guard": "no checks while training, no early stop",
    "caches": "latents and text embeddings computed at every step",
    "background_snapshots": "the training waits until each snapshot is durable",
}
"""Features that can be left out, with their replacement."""


class FullUNet(DiffusionFineTuning):
    """Trains every weight of the U-Net, without the package's default callbacks."""

    def configure_callbacks(self) -> list[Callback]:
        return []


class LoRA(DiffusionLoRA):
    """Without the package's default callbacks: images, report and LoRA files."""

    def configure_callbacks(self) -> list[Callback]:
        return []


class Look(Callback):
    """Score at the scorer's steps, and measure the kept memory at the end."""

    def __init__(self, meter: Meter, scorer: Scorer, batch: int) -> None:
        self.meter, self.scorer, self.batch = meter, scorer, batch
        self.kept_mib = 0.0
        self.trained = self.steps = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.meter.note_start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.steps = trainer.global_step
        if self.steps < self.scorer.steps and not trainer.should_stop and self.scorer.is_due(self.steps):
            self._score(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DiffusionTraining)
        self._score(pl_module)
        self.meter.pause()
        self.trained = sum(p.numel() for p in pl_module.trainable_parameters())
        tokens = pl_module.loaded().tokenizers[0].model_max_length
        self.kept_mib = kept_by_a_step_mib(pl_module.loaded().denoiser, self.batch, tokens)
        self.meter.resume()  # for the last snapshot and the end of the run

    def _score(self, module: Any) -> None:
        self.scorer.score(self.steps, module.loaded(), module.objective.schedule.config, module.averaged_weights)


class WaitForSnapshot(Callback):
    """Wait for the previous snapshot before the next batch."""

    def __init__(self, snapshots: ExactSnapshot, every: int) -> None:
        self.snapshots, self.every = snapshots, every

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step and trainer.global_step % self.every == 0:
            self.snapshots.wait()


def make_module(job: Job) -> DiffusionTraining:
    shared: dict[str, Any] = {
        "learning_rate": job.learning_rate,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": WARMUP_STEPS,
        "max_train_steps": job.steps,
        "snr_gamma": SNR_GAMMA,
        "use_ema": True,
        "ema_decay": EMA_DECAY,
        "validation_prompts": PROMPTS,
        "num_inference_steps": INFERENCE_STEPS,
        "guidance_scale": GUIDANCE,
        "output_name": job.name,
    }
    if job.is_full:
        return FullUNet(pretrained_model_name_or_path="embedded:sd", **shared)
    return LoRA("embedded:sd", rank=job.rank, lora_targets=TARGETS, **shared)


def make_callbacks(job: Job, without: str | None) -> list[Callback]:
    """Model arguments, as in a user's config."""
    snapshots = ExactSnapshot(job.snapshot_steps)
    callbacks: list[Callback] = [snapshots]
    if without == "background_snapshots":
        callbacks.append(WaitForSnapshot(snapshots, job.snapshot_steps))
    if without != "adaptive_lr":
        callbacks.append(AdaptiveLR())
    if without != "guard":
        callbacks.append(
            CLIPConvergenceGuard(
                every_n_steps=job.guard_steps,
                num_images=job.guard_images,
                patience=job.guard_patience,
                clip_model="embedded:clip",
                reference_images=8,
            )
        )
    return callbacks


def run_ours(job: Job, seed: int, folder: Path, meter: Meter, scorer: Scorer, without: str | None) -> dict[str, Any]:
    """Train until the guard stops the run or to the last step. Returns: figures that the meter does not measure."""
    seed_everything(seed, verbose=False)
    look = Look(meter, scorer, job.batch + job.batch // 2)
    options: dict[str, Any] = {"plugins": FusedBackwardPrecision("32-true", memory="lean")}
    trainer = Trainer(
        default_root_dir=str(folder),
        accelerator="cpu",
        devices=1,
        num_nodes=torch.distributed.get_world_size(),
        strategy=DDPStrategy(process_group_backend="gloo") if without == "npu_sparse" else "npu_sparse",
        max_steps=job.steps,
        max_epochs=-1,
        gradient_clip_val=MAX_GRAD_NORM,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*make_callbacks(job, without), look],
        use_distributed_sampler=False,
        **({} if without == "fused_backward" else options),
    )
    trainer.fit(make_module(job), brand_pictures(job, seed, folder, is_cached=without != "caches"))
    meter.pause()
    return {"kept_mib": round(look.kept_mib, 2), "trained": look.trained, "done": look.steps}
