"""SaveLoRA: write the LoRA as a `.safetensors` file every so many steps and at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_aigc.errors import ModelError
from lightning_aigc.protocols import DescribesTrainingData, HasOutputName, SavesLoRA


class SaveLoRA(Callback):
    """Saves `<default_root_dir>/<output_name>.safetensors` at the end; on the way and on Ctrl-C a file named by step.

    Works with any LightningModule that has `save_lora(path, **metadata)`.

    Args:
        every_n_steps: Optimizer steps between the files on the way; 0 writes the last one only.
        output_name: Name without ending; unset means the module's `output_name`, or lora.
    """

    def __init__(self, every_n_steps: int = 500, output_name: str | None = None) -> None:
        self.every_n_steps, self.output_name = every_n_steps, output_name
        self._is_off = False
        self._last_step = 0
        self._started_at = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_off = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if stage == "fit" and not isinstance(pl_module, SavesLoRA):
            raise ModelError(
                f"SaveLoRA needs a module with save_lora(path, **metadata), {type(pl_module).__name__} has none"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step, self._started_at = trainer.global_step, time.time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.every_n_steps and not self._is_off and step > self._last_step and step % self.every_n_steps == 0:
            self._last_step = step
            self._write(trainer, pl_module, f"_step_{step:06d}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_off:
            self._write(trainer, pl_module, "")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        step = trainer.global_step
        if isinstance(exception, KeyboardInterrupt) and not self._is_off and step > self._last_step:
            self._write(trainer, pl_module, f"_step_{step:06d}")
            rank_zero_info(f"saved {self.file_path(trainer, pl_module, f'_step_{step:06d}')}")

    def file_path(self, trainer: Trainer, pl_module: LightningModule, suffix: str = "") -> Path:
        """The path of the final file; of one on the way with a suffix such as `_step_000100`."""
        name = self.output_name or (pl_module.output_name if isinstance(pl_module, HasOutputName) else "lora")
        return Path(trainer.default_root_dir) / f"{name}{suffix}.safetensors"

    def final_files(self, trainer: Trainer, pl_module: LightningModule) -> list[Path]:
        """The files that a finished run must have, for ExactSnapshot."""
        return [] if self._is_off else [self.file_path(trainer, pl_module)]

    def _write(self, trainer: Trainer, pl_module: LightningModule, suffix: str) -> None:
        path = self.file_path(trainer, pl_module, suffix)
        if trainer.is_global_zero:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            of_data = data.lora_metadata() if isinstance(data, DescribesTrainingData) else {}
            assert isinstance(pl_module, SavesLoRA)
            pl_module.save_lora(
                path,
                output_name=path.stem,
                steps=trainer.global_step,
                num_epochs=trainer.current_epoch + 1,
                started_at=self._started_at,
                finished_at=time.time(),
                gradient_accumulation_steps=trainer.accumulate_grad_batches,
                mixed_precision=str(trainer.precision),
                **of_data,
            )
