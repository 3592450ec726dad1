"""What `self.log(..., on_epoch=True)` has added up in this epoch: a schedule or an early stop may look at it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)

FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def take_epoch_metrics(results: _ResultCollection) -> list[dict[str, Any]]:
    """The sums by key. A logged torchmetrics.Metric is not among them: it keeps its own in the module."""
    return [
        {
            "key": key,
            "meta": {name: getattr(metric.meta, name) for name in FIELDS} | {"reduce": metric.meta.reduce_fx.__name__},
            "sync": [metric.meta.sync.should, metric.meta.sync.rank_zero_only],
            "value": metric.value,
            "batch_size": getattr(metric, "cumulated_batch_size", None),
            "last": metric._forward_cache,
            "updates": metric._update_count,
            "has_reset": metric.has_reset,
        }
        for key, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch
    ]


def restore_epoch_metrics(results: _ResultCollection, saved: list[dict[str, Any]], trainer: Trainer) -> None:
    """Make the metrics anew as `self.log` would, with their sums."""
    device = trainer.strategy.root_device
    for one in saved:
        fields = dict(one["meta"])
        meta = _Metadata(**fields | {"reduce_fx": getattr(torch, fields.pop("reduce"))})
        should, rank_zero_only = one["sync"]
        meta.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
        metric = _ResultMetric(meta, is_tensor=True)
        metric.value = one["value"].to(device)
        if one["batch_size"] is not None:
            metric.cumulated_batch_size = one["batch_size"].to(device)
        metric._forward_cache = None if one["last"] is None else one["last"].to(device)
        metric._update_count, metric.has_reset = one["updates"], one["has_reset"]
        results[one["key"]] = metric
