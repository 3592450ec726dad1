"""StallWatch: say where each rank waits when no batch finishes any more, under any strategy of several processes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_aigc._lightning import Callback, LightningModule, Trainer
from lightning_aigc.errors import ConfigError
from lightning_aigc.gradient_sync.watch.stall_watchdog import StallWatchdog, report_folder
from lightning_aigc.setting_checks import check_types


class StallWatch(Callback):
    """Writes every rank's threads to `<default_root_dir>/stalled` when no batch has finished for a while.

    For ddp, fsdp and others; the strategy npu_sparse does the same by itself. One rank needs none.

    Args:
        after_s: Seconds without a finished batch before the report; null is a third of the timeout of collectives.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import StallWatch
        >>> trainer = Trainer(callbacks=[StallWatch(after_s=600)])
    """

    def __init__(self, after_s: float | None = None) -> None:
        check_types(StallWatch.__init__, locals())
        if after_s is not None and after_s <= 0:
            raise ConfigError(f"StallWatch.after_s must be above 0, or null for a third of the timeout; got {after_s}")
        self._after_s = after_s
        self._watchdog: StallWatchdog | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size == 1 or not dist.is_initialized():
            return
        timeout = getattr(trainer.strategy, "_timeout", None) or default_pg_timeout
        folder = report_folder(str(trainer.default_root_dir))
        self._watchdog = StallWatchdog(self._after_s, folder, trainer.global_rank, trainer.world_size, timeout)
        self._watchdog.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._progress(trainer.global_step)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._progress(trainer.global_step, "a validation batch")

    def on_exception(self, *_: Any) -> None:
        self._close()

    def teardown(self, *_: Any, **__: Any) -> None:
        self._close()

    def _progress(self, step: int, doing: str | None = None) -> None:
        if self._watchdog is not None:
            self._watchdog.progress(step, doing)

    def _close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
