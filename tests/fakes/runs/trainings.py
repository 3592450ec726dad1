"""A training that takes milliseconds: a small regression with dropout and batch statistics, and its Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

WIDTH = 8
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def make_layers() -> list[nn.Module]:
    return [
        nn.Linear(WIDTH, 16),
        nn.BatchNorm1d(16),
        nn.SiLU(),
        nn.Dropout(0.3),
        nn.Linear(16, WIDTH),
    ]


class Regression(LightningModule):
    """Learns to give its input back; a second run of a step would show in its dropout, statistics and metrics.

    Values beyond 3 are wanted back but not given in, so that a huge batch overflows in backward alone.
    """

    def __init__(self, layers: Sequence[nn.Module] | None = None, make_optimizer: MakeOptimizer | None = None) -> None:
        super().__init__()
        seed_everything(3, verbose=False)
        self.net: nn.Module = nn.Sequential(*(layers or make_layers()))
        self.seen = MeanMetric()
        self.make_optimizer = make_optimizer or (lambda parameters: torch.optim.Adam(parameters, 1e-2))

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch_NC.clamp(-3, 3)).float(), batch_NC.float())
        self.seen.update(batch_NC.clamp(-1, 1).mean())
        self.log("loss", loss.detach().clamp(max=1.0), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class ManualRegression(Regression):
    """The same under manual optimization."""

    def __init__(self, layers: Sequence[nn.Module] | None = None) -> None:
        super().__init__(layers)
        self.automatic_optimization = False

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch_NC, batch_idx))
        optimizer.step()


def make_batches(count: int = 6, huge: Sequence[int] = (), rows: int = 4) -> list[Tensor]:
    """Batches of `rows` examples; the gradients of those numbered in `huge` overflow float16."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(rows, WIDTH, generator=generator) for _ in range(count)]
    for number in huge:
        batches[number] = batches[number] * 1e6
    return batches


def make_trainer(plugin: Precision, **arguments: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "max_epochs": 1,
    }
    return Trainer(**(quiet | arguments), plugins=[plugin])


def fit(plugin: Precision, module: Regression, batches: Sequence[Tensor], **arguments: Any) -> Trainer:
    trainer = make_trainer(plugin, **arguments)
    seed_everything(5, verbose=False)
    trainer.fit(module, DataLoader(list(batches), batch_size=None))
    return trainer
