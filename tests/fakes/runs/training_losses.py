"""The losses of each example in one training step of a DiffusionTraining."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch import Tensor

from lightning_aigc.diffusion import DiffusionTraining
from lightning_aigc.diffusion.training import module as training_module


def example_losses(module: DiffusionTraining, batch: dict[str, Any]) -> Tensor:
    """Run `training_step` without a Trainer; returns its weighted losses [B], with gradients."""
    found: list[Tensor] = []

    def keep(loss_B: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
        found.append(loss_B)
        return loss_B.mean(), loss_B.mean(), None

    with mock.patch.object(training_module, "with_prior", keep), mock.patch.object(type(module), "log"):
        module.training_step(batch, 0)
    return found[0]
