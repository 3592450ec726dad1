"""A small training with all sources of randomness, which can be stopped at any micro-batch and resumed."""

from __future__ import annotations

import lightning_aigc  # noqa: F401  # first: a loader's worker that was not forked has nothing imported

# isort: split
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SAMPLES = 24
WIDTH = 8


class Noisy(Dataset[Tensor]):
    """Samples augmented from python's, numpy's and torch's global random states."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH) + index / 10 + random.random() + float(np.random.rand())


class Net(LightningModule):
    """Dropout, running statistics, noise in the step, a schedule that looks at the epoch's mean loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, WIDTH)
        )
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        noise = torch.randn(()) * 0.1 + self.seen.sin() * 0.01
        loss = (self.net(batch_NC) - batch_NC + noise).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch_NC: Tensor, batch_idx: int) -> None:
        self.log("val", (self.net(batch_NC) - batch_NC).square().mean() + torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0, factor=0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "epoch", "monitor": "loss_epoch"},
        }

    def flat(self) -> Tensor:
        return torch.cat([v.detach().float().view(-1) for v in self.state_dict().values()])


class Killed(Exception):  # noqa: N818  it stands for SIGKILL
    """Nothing of a run is told of it."""


class KillAt(Callback):
    """Ends the run at the start of one micro-batch, counted over epochs, as SIGKILL would: nobody is told."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            self.kill(trainer)

    def kill(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.on_exception = lambda *_: None
        raise Killed


def train(
    root: Path,
    callbacks: Sequence[Callback] = (),
    *,
    ckpt_path: str | None = None,
    workers: int = 0,
    accumulate: int = 3,
    module: LightningModule | None = None,
    loader: Any = None,
    **arguments: Any,
) -> Any:
    """The module after a run of three epochs of twelve micro-batches."""
    seed_everything(7, verbose=False)
    module = Net() if module is None else module
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 3, "val_check_interval": 5, "gradient_clip_val": 0.5}
    trainer = Trainer(
        **(quiet | options | {"default_root_dir": root, "accumulate_grad_batches": accumulate} | arguments),
        callbacks=list(callbacks),
    )
    if loader is None:
        loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(module, loader, DataLoader(Noisy(), batch_size=4), ckpt_path=ckpt_path)
        except Killed:
            for callback in trainer.callbacks:  # the lock goes with a killed process; here the process lives on
                if hasattr(callback, "abandon"):
                    callback.abandon()
    return module
