"""Hyperparameters with the run's final scores, for TensorBoard's HParams table and for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_aigc.secrets import redact

RESULTS = (
    "clip_t_after",
    "clip_i_after",
    "prior_clip_t_after",
    "final_loss",
    "best_step",
    "seconds",
    "peak_memory_mib",
)
"""Entries of summary.json for loggers, as `final/...`."""


def announce_hyperparameters(trainer: Trainer, pl_module: LightningModule) -> None:
    """Tell TensorBoard which metrics the hyperparameters will have.

    TensorBoard keeps the first such message of a run. Lightning's own, a moment later, names `hp_metric` alone.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    given = dict(data.hparams_initial) if data is not None else {}
    given |= dict(pl_module.hparams_initial)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
            from torch.utils.tensorboard.summary import hparams

            flat = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in redact(given).items()}
            writer = logger.experiment._get_file_writer()  # as Lightning does: the public door makes another run
            metrics = {_name(result): 0.0 for result in RESULTS}
            for message in hparams(flat, metrics):  # type: ignore[no-untyped-call]
                writer.add_summary(message)


def log_results(trainer: Trainer, summary: Mapping[str, Any]) -> None:
    """Log the final numbers under the names that were announced."""
    found = {_name(result): float(summary[result]) for result in RESULTS if summary.get(result) is not None}
    for logger in trainer.loggers:
        logger.log_metrics(found, step=trainer.global_step)


def _name(result: str) -> str:
    return f"final/{result.removesuffix('_after').removeprefix('final_')}"
