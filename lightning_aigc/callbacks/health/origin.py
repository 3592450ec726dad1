"""Which module made the value that is not finite: the kept batches of a step are run again and watched."""

from __future__ import annotations

import inspect
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_aigc.devices import RandomStates, random_states
from lightning_aigc.precision.non_finite import NonFinite, first_non_finite
from lightning_aigc.precision.replay import loss_of, without_trace

KEPT_BATCHES = 8
"""Batches of an accumulation window that can be run again, the last ones; they stay on the device until its end."""


@dataclass(frozen=True)
class _Kept:
    arguments: list[Any]
    states: RandomStates


class Origin:
    """Keeps the batches of the running window, and finds in them where a step went wrong."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=KEPT_BATCHES)

    def keep(self, model: LightningModule, batch: Any, batch_idx: int) -> None:
        """Call it at the start of each batch: what a module draws in its own hooks before the step is drawn anew."""
        takes_number = "batch_idx" in inspect.signature(model.training_step).parameters
        self._kept.append(_Kept([batch, batch_idx] if takes_number else [batch], random_states(model.device)))

    def forget(self) -> None:
        self._kept.clear()

    def find(self, trainer: Trainer, model: LightningModule, scale: float) -> NonFinite | None:
        """The first module that made such a value; None where a second run is finite or impossible."""
        if not model.automatic_optimization:
            return None  # such a step moves the weights itself
        for kept in self._kept:

            def loss(arguments: list[Any] = kept.arguments) -> Tensor | None:
                with trainer.precision_plugin.forward_context(), torch.enable_grad():
                    return loss_of(model, arguments)

            try:
                with without_trace(model, kept.states):
                    found = first_non_finite(model, loss, scale)
            except Exception:  # a second run is a courtesy: it must not end the training
                return None
            if found is not None:
                return found
        return None
