"""One or two lines at the start of a run with the places of its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from lightning_aigc.callbacks import CLIPConvergenceGuard, RunReport, SampleGrid
from lightning_aigc.callbacks.run_report.run_report import REPORT_FILE
from lightning_aigc.protocols import HasValidationPrompts


def where_to_look(trainer: Any, module: Any) -> list[str]:
    """The run's folder and what comes into it, and the commands of its loggers.

    Args: module: a module that brings RunReport and SampleGrid itself has `validation_prompts`.
    """
    root = Path(trainer.default_root_dir)
    found = trainer.callbacks
    brings_report = isinstance(module, HasValidationPrompts)
    parts = []
    if any(isinstance(c, SampleGrid) for c in found) or (brings_report and module.validation_prompts):
        parts.append("images in samples/")
    if any(isinstance(c, CLIPConvergenceGuard) for c in found):
        parts.append("scored images in guard/")
    if brings_report or any(isinstance(c, RunReport) for c in found):
        parts.append(f"{REPORT_FILE} at the end; the page so far: lightning report {root} -o {root / REPORT_FILE}")
    lines = [f"run: {root}" + (f" ({', '.join(parts)})" if parts else "")]
    live = []
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            live.append(f"tensorboard --logdir {logger.root_dir}")
        elif isinstance(logger, WandbLogger):
            is_offline = logger._offline or os.environ.get("WANDB_MODE") == "offline"
            live.append("Weights & Biases, offline: wandb sync afterwards" if is_offline else "Weights & Biases")
    return [*lines, f"live: {', '.join(live)}"] if live else lines
