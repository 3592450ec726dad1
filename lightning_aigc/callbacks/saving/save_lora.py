"""SaveLoRA: write the LoRA as a `.safetensors` file every `every_n_steps` steps and at the end."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_aigc.callbacks.saving.save_result import SaveResult
from lightning_aigc.errors import ModelError
from lightning_aigc.protocols import DescribesTrainingData, SavesLoRA
from lightning_aigc.sharding.original_class import original_class


class SaveLoRA(SaveResult):
    """Saves `<default_root_dir>/<output_name>.safetensors` at the end; on the way and on Ctrl-C a file named by step.

    Works with any LightningModule that has `save_lora(path, **metadata)`.

    Args:
        every_n_steps: Optimizer steps between the files on the way; 0 writes the last one only.
        output_name: Name without ending; unset means the module's `output_name`, or lora.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import SaveLoRA
        >>> trainer = Trainer(callbacks=[SaveLoRA(every_n_steps=500)])
    """

    unnamed = "lora"

    def __init__(self, every_n_steps: int = 500, output_name: str | None = None) -> None:
        super().__init__(every_n_steps, output_name)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and not isinstance(pl_module, SavesLoRA):
            raise ModelError(
                f"SaveLoRA needs a module with save_lora(path, **metadata), "
                f"{original_class(pl_module).__name__} has none"
            )

    def _write(self, trainer: Trainer, pl_module: LightningModule, suffix: str) -> None:
        path = self.file_path(trainer, pl_module, suffix)
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
