"""One progress bar for the whole run: optimizer steps, loss, steps a second, time left, and the last scores."""

from __future__ import annotations

import math
import sys
from typing import Any

from tqdm import tqdm

from lightning_aigc._lightning import LightningModule, ProgressBar, Trainer
from lightning_aigc.setting_checks import check_types

HIDDEN_METRICS = ("v_num",)


class RunProgress(ProgressBar):
    """Counts optimizer steps to the end of the run, where Lightning's bars start anew every epoch.

    Args:
        refresh_every_n_steps: Optimizer steps between two updates of the metrics, which wait for the device.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import RunProgress
        >>> trainer = Trainer(callbacks=[RunProgress()])
    """

    def __init__(self, refresh_every_n_steps: int = 1) -> None:
        super().__init__()
        check_types(RunProgress.__init__, locals())
        self.refresh_every_n_steps = refresh_every_n_steps
        self._bar: tqdm | None = None
        self._is_enabled = True
        self._shown: dict[str, float] = {}

    def show(self, values: dict[str, float]) -> None:
        """Show these values at the end of the bar until newer ones come."""
        self._shown |= {name: value for name, value in values.items() if name == "clip_t"}

    def disable(self) -> None:
        self._is_enabled = False

    def enable(self) -> None:
        self._is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self._is_enabled:
            tqdm.write(" ".join(map(str, args)), file=sys.stderr)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_enabled:
            return
        total = trainer.estimated_stepping_batches
        self._bar = tqdm(
            total=None if math.isinf(total) else int(total),
            initial=trainer.global_step,
            desc="training",
            unit="step",
            dynamic_ncols=True,
            smoothing=0.05,
            disable=not trainer.is_global_zero,
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        bar = self._bar
        if bar is None or trainer.global_step == bar.n:
            return
        bar.update(trainer.global_step - bar.n)
        if trainer.global_step % self.refresh_every_n_steps == 0:
            metrics = {k: v for k, v in self.get_metrics(trainer, pl_module).items() if k not in HIDDEN_METRICS}
            metrics |= self._shown
            bar.set_postfix({k: f"{v:.3f}" if isinstance(v, float) else v for k, v in metrics.items()}, refresh=False)
        if bar.n == bar.total:
            self.finish()  # what is sampled after the last step is no part of a step's time

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.finish()

    def finish(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
