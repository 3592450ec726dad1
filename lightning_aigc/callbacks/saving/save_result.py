"""SaveResult: base class of the callbacks that write what a training made, at its end and on the way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_aigc.callbacks.sampling.gathered import written_weights
from lightning_aigc.callbacks.saving.output_name import check_output_name
from lightning_aigc.protocols import HasOutputName


class SaveResult(Callback):
    """Saves `<default_root_dir>/<output_name>.safetensors` at the end; on the way and on Ctrl-C a file named by step.

    Args:
        every_n_steps: Optimizer steps between the files on the way; 0 writes the last one only.
        output_name: Name without ending; unset means the module's `output_name`, or `unnamed`.
    """

    unnamed = "model"
    """The name where neither the callback nor the module has one."""

    def __init__(self, every_n_steps: int = 0, output_name: str | None = None) -> None:
        self.every_n_steps, self.output_name = every_n_steps, output_name
        self._is_off = False
        self._last_step = 0
        self._started_at = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_off = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        argument = "output_name" if self.output_name else "model.init_args.output_name"
        check_output_name(self._name(pl_module), argument)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step, self._started_at = trainer.global_step, time.time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.every_n_steps and not self._is_off and step > self._last_step and step % self.every_n_steps == 0:
            self._last_step = step
            self._save(trainer, pl_module, f"_step_{step:06d}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_off:
            self._save(trainer, pl_module, "")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        step = trainer.global_step
        if isinstance(exception, KeyboardInterrupt) and not self._is_off and step > self._last_step:
            self._save(trainer, pl_module, f"_step_{step:06d}")
            rank_zero_info(f"saved {self.file_path(trainer, pl_module, f'_step_{step:06d}')}")

    def file_path(self, trainer: Trainer, pl_module: LightningModule, suffix: str = "") -> Path:
        """The path of the final file; of one on the way with a suffix such as `_step_000100`."""
        return Path(trainer.default_root_dir) / f"{self._name(pl_module)}{suffix}.safetensors"

    def _name(self, pl_module: LightningModule) -> str:
        return self.output_name or (pl_module.output_name if isinstance(pl_module, HasOutputName) else self.unnamed)

    def final_files(self, trainer: Trainer, pl_module: LightningModule) -> list[Path]:
        """The files that a finished run must have, for ExactSnapshot."""
        return [] if self._is_off else [self.file_path(trainer, pl_module)]

    def _save(self, trainer: Trainer, pl_module: LightningModule, suffix: str) -> None:
        with written_weights(pl_module) as writes:
            if writes:
                self._write(trainer, pl_module, suffix)

    def _write(self, trainer: Trainer, pl_module: LightningModule, suffix: str) -> None:
        """Write the files of this suffix; called on rank 0, with whole weights."""
        raise NotImplementedError
