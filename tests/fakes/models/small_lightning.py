"""A LightningModule with two matrices for tests with several ranks, and its Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH = 40


class Small(LightningModule):
    """Compressed matrices, a protected one, and biases; each rank has batches of its own.

    `bad` are the (step, rank) whose loss is NaN; `unused` leaves one matrix out of every second step.
    """

    def __init__(self, bad: Sequence[tuple[int, int]] = (), factor: float = torch.nan, *, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.bad, self.factor, self.unused = bad, factor, unused
        self.after: list[Tensor] = []
        self.rates: list[float] = []

    def training_step(self, batch_NC: Tensor, batch_idx: int) -> Tensor:
        out_NC = self.net(batch_NC)
        if not self.unused or batch_idx % 2:
            out_NC = self.head(out_NC)
        loss = nn.functional.mse_loss(out_NC.float(), batch_NC.float())
        self.log("loss", loss.detach())
        return loss * self.factor if (self.global_step, self.global_rank) in self.bad else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def flat(self) -> Tensor:
        return torch.cat([p.detach().cpu().view(-1) for p in self.parameters()])


class AfterEachStep(Callback):
    """Keeps the parameters that each step left."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        assert isinstance(module, Small)
        module.after.append(module.flat())


def make_batches(rank: int, count: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def make_trainer(**arguments: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": tempfile.gettempdir(),  # a watchdog may write there
    }
    callbacks = [AfterEachStep(), *arguments.pop("callbacks", [])]
    return Trainer(**(quiet | arguments), callbacks=callbacks)


def fit(rank: int, module: Small | None = None, *, batches: int = 8, ckpt_path: Any = None, **arguments: Any) -> Any:
    """The module and the trainer after a run."""
    module = Small() if module is None else module
    trainer = make_trainer(**arguments)
    trainer.fit(module, DataLoader(make_batches(rank, batches), batch_size=None), ckpt_path=ckpt_path)
    return module, trainer
