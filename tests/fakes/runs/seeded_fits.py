"""Short fits of a model family on one batch, seeded by step, and comparisons of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from fakes.models.pipelines import make_batch


class SeededSteps(Callback):
    """Seeds each step by its number, so that a resumed run draws the same noise, and keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(1000 + trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def fit(
    module: LightningModule,
    folder: Path,
    *callbacks: Callback,
    ckpt: str | None = None,
    batch: dict[str, Any] | None = None,
    data: Any = None,
    **options: Any,
) -> list[float]:
    """Train on the same batch again and again, or on `data`; returns the losses."""
    seeds = SeededSteps()
    quiet: dict[str, Any] = {
        "default_root_dir": str(folder), "accelerator": "cpu", "devices": 1, "max_epochs": -1, "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks), "enable_progress_bar": False,
        "enable_model_summary": False, "callbacks": [seeds, *callbacks],
    }  # fmt: skip
    data = data or DataLoader([batch or make_batch()], batch_size=None)  # type: ignore[arg-type]
    Trainer(**(quiet | options)).fit(module, data, ckpt_path=ckpt)
    return seeds.losses


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def cloned(module: torch.nn.Module | None) -> dict[str, Tensor]:
    """A copy of a module's state."""
    assert module is not None
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
