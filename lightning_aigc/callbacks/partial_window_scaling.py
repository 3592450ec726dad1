"""PartialWindowScaling: a mean over the micro-batches of an epoch's last accumulation window, under Lightning."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer

from lightning_aigc._lightning import Callback, LightningModule, Trainer, rank_zero_info
from lightning_aigc.accumulation import effective_batch_size, scale_to_mean


@runtime_checkable
class HasTrainBatchSize(Protocol):
    """Has a batch size per rank."""

    train_batch_size: int


class PartialWindowScaling(Callback):
    """Scale the gradient of an epoch's partial accumulation window to the mean of the micro-batches it has.

    Lightning divides every loss by `accumulate_grad_batches`, also in an epoch's last window, which may have fewer
    micro-batches; its step is then too small. The gradient is scaled before clipping, and full windows keep their bits.
    The log says the effective batch size at the start.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import PartialWindowScaling
        >>> trainer = Trainer(callbacks=[PartialWindowScaling()])
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        batch_size = data.train_batch_size if isinstance(data, HasTrainBatchSize) else None
        batch_size = batch_size or getattr(loader, "batch_size", None)
        if batch_size:
            said = effective_batch_size(int(batch_size), trainer.accumulate_grad_batches, trainer.world_size)
            rank_zero_info(f"effective batch size: {said}")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        full = trainer.accumulate_grad_batches
        count = trainer.fit_loop.epoch_loop.batch_progress.current.ready % full or full
        scale_to_mean([p for group in optimizer.param_groups for p in group["params"]], count, full)
