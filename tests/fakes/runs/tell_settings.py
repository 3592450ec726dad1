"""A callback for configs of tests: writes what a run under ZeROStrategy trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_aigc.sharding.layout import is_sharded


class TellSettings(Callback):
    """At the end of the training rank 0 writes its settings and the losses to `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        plugin: Any = trainer.precision_plugin
        optimizer = trainer.optimizers[0]
        told = {
            "stage": strategy.stage, "offload_optimizer": strategy.offload_optimizer, "precision": plugin.precision,
            "memory": plugin.memory, "offload": plugin.offload, "gradient_clip_val": trainer.gradient_clip_val,
            "accumulate_grad_batches": trainer.accumulate_grad_batches, "is_sharded": is_sharded(pl_module),
            "optimizer": type(optimizer).__name__, "lr": optimizer.param_groups[0]["initial_lr"],
            "steps": trainer.global_step, "losses": self.losses,
        }  # fmt: skip
        if trainer.is_global_zero:
            Path(self.path).write_text(json.dumps(told), encoding="utf-8")
