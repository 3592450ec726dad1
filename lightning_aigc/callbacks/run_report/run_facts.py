"""The facts of a run that need no measuring: where it is, on what, what its other callbacks say, its file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning_aigc._lightning import LightningModule, TensorBoardLogger, Trainer
from lightning_aigc.callbacks.sampling.judges import draws_edits
from lightning_aigc.callbacks.saving.save_result import SaveLoRA
from lightning_aigc.checkpoint.files.reader import find_snapshots
from lightning_aigc.errors import SnapshotError
from lightning_aigc.protocols import DescribesTrainingData, SamplesEdits
from lightning_aigc.report.record import LoRAFile, RunRecord, Snapshots
from lightning_aigc.secrets import redact

CONFIG_FILE = "config.yaml"
SHARED = ("figures", "result_files", "sheets")
"""Fields of the record that several callbacks add to."""


@runtime_checkable
class AddsToReport(Protocol):
    """Has results for RunReport's page: callbacks, strategies and modules."""

    def report_entries(self) -> Mapping[str, Any]:
        """Return fields of `report.record.RunRecord` by name, such as `guard`. Starts no collective."""
        ...


def record_of(trainer: Trainer, pl_module: LightningModule) -> RunRecord:
    """A record with the run's facts, and the entries of every callback and strategy that has some."""
    root = Path(trainer.default_root_dir)
    config = root / CONFIG_FILE
    record = RunRecord(
        name=root.resolve().name,
        folder=str(root),
        steps=trainer.global_step,
        device=device_name(pl_module),
        world_size=trainer.world_size,
        precision=str(trainer.precision),
        date=time.strftime("%Y-%m-%d"),
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
    )
    found: list[Any] = [*trainer.callbacks, trainer.strategy, pl_module]  # type: ignore[attr-defined]
    for source in found:
        if isinstance(source, AddsToReport):
            for name, value in source.report_entries().items():
                setattr(record, name, getattr(record, name) | value if name in SHARED else value)
    return record


def device_name(pl_module: LightningModule) -> str:
    """`cpu`, or the card's name."""
    import torch

    device = pl_module.device
    module: Any = getattr(torch, device.type, None)
    name: str = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    return name


def result_file(trainer: Trainer, pl_module: LightningModule) -> LoRAFile | None:
    """The file that SaveLoRA writes at the end, with what one has to know to use it."""
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    saver = next((callback for callback in found if isinstance(callback, SaveLoRA)), None)
    if saver is None:
        return None
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    described: Mapping[str, Any] = data.lora_metadata() if isinstance(data, DescribesTrainingData) else {}
    base = pl_module.hparams.get("pretrained_model_name_or_path")
    word = described.get("trigger_phrase")
    edits = draws_edits(trainer)
    return LoRAFile(
        str(saver.file_path(trainer, pl_module)),
        str(word) if word else None,
        str(base) if base else None,
        edits=edits,
        base_pipeline=pl_module.base_pipeline if isinstance(pl_module, SamplesEdits) else None,
        edit_pipeline=pl_module.edit_pipeline if edits and isinstance(pl_module, SamplesEdits) else None,
        lokr_of=_denoiser_name(pl_module) if pl_module.hparams.get("lora_type") == "lokr" else None,
    )


def _denoiser_name(pl_module: LightningModule) -> str:
    return "unet" if hasattr(pl_module, "unet") else "transformer"


def snapshots_in(folder: Any, blocked_s: Sequence[float]) -> Snapshots:
    """The report's facts about a run's snapshots: the time of each, and the newest that is complete."""
    blocked_ms = in_ms(blocked_s)
    with contextlib.suppress(SnapshotError):  # a folder in a remote store is not read
        for newest in find_snapshots(folder):
            size = sum(file.size for file in newest.files.values())
            return Snapshots(len(blocked_ms), blocked_ms, str(newest.path), newest.step, size)
    return Snapshots(len(blocked_ms), blocked_ms)


def in_ms(seconds: Sequence[float]) -> list[float]:
    return [round(1000 * value, 2) for value in seconds]


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
