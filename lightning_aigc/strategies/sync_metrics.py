"""What a logger gets of a step's gradient sync."""

from __future__ import annotations

from typing import Any

from lightning_aigc.gradient_sync.base import Sync


def sync_metrics(sync: Sync) -> dict[str, float]:
    """Return the last step's bytes in MB by kind, its times, and how many steps were skipped; nothing before it."""
    report = sync.report
    if report is None:
        return {}
    numbers = {f"sync/{kind}_mb": sent / 1e6 for kind, sent in report.sent_bytes.items()}
    return numbers | {
        "sync/between_nodes_mb": report.between_nodes_bytes / 1e6,
        "sync/ratio_to_dense": report.ratio,
        "sync/exposed_ms": report.exposed_ms,
        "sync/share_hidden": report.share_hidden,
        "sync/skipped_steps": float(sync.skipped_steps),
    }


def log_step(module: Any, sync: Sync, optimizer_steps: int) -> None:
    """Give the loggers of the module's Trainer the last step's numbers, every `log_every_n_steps`; 0 is never."""
    trainer = module.trainer if module is not None else None
    if trainer is None or sync.report is None:
        return
    every = trainer.log_every_n_steps
    if not every or optimizer_steps % every:
        return
    for logger in trainer.loggers:
        logger.log_metrics(sync_metrics(sync), step=trainer.fit_loop.epoch_loop._batches_that_stepped)
