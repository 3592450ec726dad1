"""The callbacks that every run gets unless the user provides their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_aigc._lightning import Callback, ModelCheckpoint, RichProgressBar, TQDMProgressBar, rank_zero_warn
from lightning_aigc.callbacks import CLIPConvergenceGuard, ExactSnapshot, RunProgress, RunReport, SampleGrid
from lightning_aigc.callbacks.saving.save_result import SaveResult
from lightning_aigc.diffusion.training.settings import TrainingSettings

ALL = 10**9
LIMITS: dict[str, type[Callback]] = {"checkpoints_total_limit": ExactSnapshot, "step_files_total_limit": SaveResult}
"""Settings that the default callback of a class reads."""


def has_default_snapshots(trainer: Any, settings: TrainingSettings) -> bool:
    """Whether the defaults include ExactSnapshot; `enable_checkpointing: false` turns it off."""
    has_checkpoints = any(isinstance(callback, ModelCheckpoint) for callback in trainer.callbacks)
    return bool(has_checkpoints and settings.checkpoints_total_limit)


def default_callbacks(trainer: Any, settings: TrainingSettings, saver: Callback) -> list[Callback]:
    """Report, `saver` for the result, sample grids, a progress bar, and snapshots by step for `--resume`.

    They replace the Trainer's own progress bar and its checkpoint at each epoch's end; the user's callbacks stay.
    """
    if trainer.fast_dev_run:
        return []
    given = trainer.callbacks
    wanted: list[Callback] = [_report(given), saver]
    if settings.validation_prompts:
        wanted.append(
            SampleGrid(
                every_n_steps=settings.validation_steps,
                num_images=settings.num_validation_images,
                seed=settings.validation_seed,
            )
        )
    if has_default_snapshots(trainer, settings):
        limit = settings.checkpoints_total_limit
        wanted.append(ExactSnapshot(settings.checkpointing_steps, keep_last=ALL if limit < 0 else limit))
    for setting, kind in LIMITS.items():
        own = next((callback for callback in given if isinstance(callback, kind)), None)
        if own is not None and getattr(settings, setting) != TrainingSettings.__dataclass_fields__[setting].default:
            rank_zero_warn(
                f"model.init_args.{setting} changes nothing, because trainer.callbacks has {type(own).__name__}; set"
                f" its keep_last: {getattr(settings, setting)} instead"
            )
    wanted = [c for c in wanted if not any(isinstance(g, type(c)) for g in given)]
    for callback in list(given):
        if type(callback) in (TQDMProgressBar, RichProgressBar):
            given.remove(callback)
            wanted.append(RunProgress())
        elif isinstance(callback, ModelCheckpoint) and _is_default(callback):
            given.remove(callback)
    return wanted


def _report(given: Sequence[Callback]) -> RunReport:
    """The report of a guarded run scores by the guard's model, and images of the guard's prompts."""
    guard = next((callback for callback in given if isinstance(callback, CLIPConvergenceGuard)), None)
    return RunReport() if guard is None else RunReport(guard.clip_model, guard.clip_pretrained, guard.prompts)


def _is_default(callback: ModelCheckpoint) -> bool:
    """Whether this callback has no argument, as the one that the Trainer creates where the user gives none."""
    return type(callback) is ModelCheckpoint and repr(vars(callback)) == repr(vars(ModelCheckpoint()))
