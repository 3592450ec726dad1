"""The LightningCLI behind fit, validate, test and predict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

# Imported so that YAML may name every one of our classes without its path.
from lightning_aigc import callbacks, data, diffusion  # noqa: F401
from lightning_aigc.cli.config_errors import readable_config_error


class AIGCArgumentParser(LightningArgumentParser):
    """Says what is wrong with a config in one line instead of sixty."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        print(f"error: {readable_config_error(message, self)}", file=sys.stderr)
        raise SystemExit(2)


class SaveConfig(SaveConfigCallback):
    """Saves the whole config beside the run's other results too, not only in the logger's folder."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        root = Path(trainer.default_root_dir)
        root.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, str(root / "config.yaml"), skip_none=False, overwrite=True, multifile=False)


class AIGCCLI(LightningCLI):
    """LightningCLI for any LightningModule and LightningDataModule, ours by short name."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=AIGCArgumentParser,
            seed_everything_default=42,
            trainer_defaults={"max_epochs": -1, "default_root_dir": "runs/default"},
            # DESIGN decision 13: the automatic key binds parameters before the LoRA exists.
            auto_configure_optimizers=False,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--threads", type=int | None, default=None, help="CPU threads for torch; unset leaves torch's own choice."
        )
        parser.add_argument(
            "--dry_run",
            action="store_true",
            help="Report data, buckets, parameters and memory, take one real step, write nothing.",
        )

    def before_instantiate_classes(self) -> None:
        threads = self._get(self.config, "threads")
        if threads:
            torch.set_num_threads(threads)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        if self._get(self.config, "dry_run"):
            from lightning_aigc.cli.dry_run import dry_run_trainer_arguments

            kwargs |= dry_run_trainer_arguments()
            self.save_config_callback = None
        return super().instantiate_trainer(**kwargs)
