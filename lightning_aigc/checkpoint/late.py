"""Tensors that are copied for a snapshot while training already goes on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor


class LateTensors:
    """Trained parameters and optimizer state: what nothing should write until the next optimizer step.

    None in manual optimization, where only the module knows when that is. Averages are among them only if the module
    says so with `late_snapshot_keys`: some update theirs in a forward, through `.data`, which no version counts.

    Args: checkpoint: what Lightning would save now.
    """

    def __init__(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        self._found: dict[int, tuple[Tensor, int]] = {}
        if trainer.lightning_module.automatic_optimization:
            groups = [group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
            states = [list(optimizer.state.values()) for optimizer in trainer.optimizers]
            also = [checkpoint.get(key) for key in getattr(trainer.lightning_module, "late_snapshot_keys", ())]
            self._add([groups, states, also])

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.numel():
                self._found[value.data_ptr()] = value, value._version
        elif isinstance(value, (dict, list, tuple)):
            for one in value.values() if isinstance(value, dict) else value:
                self._add(one)

    @property
    def addresses(self) -> Collection[int]:
        return self._found.keys()

    def were_written(self) -> bool:
        """Whether something has changed one of them since."""
        return any(tensor._version != version for tensor, version in self._found.values())
