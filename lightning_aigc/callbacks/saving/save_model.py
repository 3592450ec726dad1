"""SaveModel: write trained models as a diffusers folder and a single file, on the way and at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_aigc.callbacks.saving.save_result import SaveResult
from lightning_aigc.errors import ModelError
from lightning_aigc.protocols import SavesModel
from lightning_aigc.sharding.original_class import original_class


class SaveModel(SaveResult):
    """Saves `<output_name>/` and `<output_name>.safetensors` in `default_root_dir` at the end; by step on the way.

    Works with any LightningModule that has `save_model(path)`.

    Args:
        every_n_steps: Optimizer steps between the files on the way, each as large as the model; 0 writes the last only.
        output_name: Name without ending; unset means the module's `output_name`, or model.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_aigc.callbacks import SaveModel
        >>> trainer = Trainer(callbacks=[SaveModel(every_n_steps=500)])
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and not isinstance(pl_module, SavesModel):
            raise ModelError(
                f"SaveModel needs a module with save_model(path), {original_class(pl_module).__name__} has none"
            )
        self._written: list[Path] = []
        self._kind = pl_module.saved_kind if isinstance(pl_module, SavesModel) else "model"

    def report_entries(self) -> dict[str, Any]:
        """The written folder and files, for the summary; a second file's key ends in `_2`."""
        found: dict[str, str] = {}
        for path in self._written:
            key = f"{self._kind}_{'folder' if path.is_dir() else 'file'}"
            found[f"{key}_2" if key in found else key] = str(path)
        return {"result_files": found}

    def _write(self, trainer: Trainer, pl_module: LightningModule, suffix: str) -> None:
        path = self.file_path(trainer, pl_module, suffix)
        assert isinstance(pl_module, SavesModel)
        self._written = list(pl_module.save_model(path))
