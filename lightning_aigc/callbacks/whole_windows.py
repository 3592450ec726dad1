"""WholeWindows: the short last window of an epoch counts as much as it has micro-batches, also under Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_aigc.accumulation import effective_batch_size, scale_to_mean


class WholeWindows(Callback):
    """Lightning divides every loss by `accumulate_grad_batches`, in an epoch's short last window too: its step is then
    too small by what is missing. Here that step's gradient is scaled to the mean of the batches it has, before
    clipping.

    Full windows keep their bits. The effective batch size is said at the start.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        batch_size = getattr(trainer.datamodule, "train_batch_size", None) or getattr(loader, "batch_size", None)  # type: ignore[attr-defined]
        if batch_size:
            said = effective_batch_size(int(batch_size), trainer.accumulate_grad_batches, trainer.world_size)
            rank_zero_info(f"effective batch size: {said}")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        full = trainer.accumulate_grad_batches
        count = trainer.fit_loop.epoch_loop.batch_progress.current.ready % full or full
        scale_to_mean([p for group in optimizer.param_groups for p in group["params"]], count, full)
