"""The callbacks that every LoRA run has unless the user brought their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar

from lightning_aigc.callbacks import ExactSnapshot, RunProgress, RunReport, SampleGrid, SaveLoRA

if TYPE_CHECKING:
    from lightning_aigc.diffusion.stable_diffusion_lora import StableDiffusionLoRA

ALL = 10**9


def default_callbacks(module: StableDiffusionLoRA, trainer: Any) -> list[Callback]:
    """Report, LoRA files, sample grids, one progress bar and snapshots by step, which `--resume` goes on from.

    What the Trainer added by itself (its bar, its checkpoint at each epoch's end) makes room; what the user gave stays.
    """
    if trainer.fast_dev_run:
        return []
    args, given = module.args, trainer.callbacks
    wanted: list[Callback] = [RunReport(), SaveLoRA(every_n_steps=args.checkpointing_steps)]
    if module.validation_prompts:
        wanted.append(
            SampleGrid(
                every_n_steps=args.validation_steps, num_images=args.num_validation_images, seed=args.validation_seed
            )
        )
    if args.checkpoints_total_limit and any(isinstance(g, ModelCheckpoint) for g in given):
        limit = args.checkpoints_total_limit
        wanted.append(ExactSnapshot(args.checkpointing_steps, keep_last=ALL if limit < 0 else limit))
    wanted = [c for c in wanted if not any(isinstance(g, type(c)) for g in given)]
    for callback in list(given):
        if type(callback) in (TQDMProgressBar, RichProgressBar):
            given.remove(callback)
            wanted.append(RunProgress())
        elif isinstance(callback, ModelCheckpoint) and _is_default(callback):
            given.remove(callback)
    return wanted


def _is_default(callback: ModelCheckpoint) -> bool:
    """Whether the Trainer made this callback itself, because the user gave none."""
    return (
        callback.dirpath is None
        and callback.monitor is None
        and callback._every_n_train_steps == 0
        and callback._train_time_interval is None
    )
