"""What is said about steps that a dynamic loss scale skipped: where it began, the scale, and what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_aigc.devices import RandomStates
from lightning_aigc.precision.non_finite import NonFinite, first_non_finite, non_finite_parameters
from lightning_aigc.precision.replay import loss_of, step_arguments, without_trace

MANY_SKIPS = 5
"""Skipped steps in a row from which the line says what to change."""

FUSED_OPTIMIZER_CHECK = 100
"""Optimizer steps between two looks at the loss scale where the optimizer skips steps on the device by itself."""

_log = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # where rank_zero_info writes


class SkippedSteps:
    """Counts skipped steps and says one line about each.

    Args:
        forward_context: The autocast that a training step runs in.
    """

    def __init__(self, forward_context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.forward_context = forward_context
        self.step_states: RandomStates | None = None
        """Random states at the start of the last training step; None if it cannot be run again."""
        self._in_a_row = 0
        self._fused_steps = 0
        self._fused_scale = 0.0

    def note_step_taken(self) -> None:
        """A step was not skipped."""
        self._in_a_row = 0

    def forget(self) -> None:
        """The run is over."""
        self._in_a_row = 0
        self.step_states = None

    def report(self, model: LightningModule, closure: Callable[[], Any], scaler: torch.amp.GradScaler) -> None:
        """Say where the step that was just skipped went wrong. Every rank must call it, and one of them speaks."""
        self._in_a_row += 1
        after = scaler.get_scale()
        before = after / scaler.get_backoff_factor()
        found, reason = self._look_for(model, closure, before)
        if not _speaks(model, found is not None):
            return
        line = (
            f"step {model.trainer.global_step + 1} skipped: {reason}; the weights stay as they were, the loss scale"
            f" goes from {before:g} to {after:g}, training goes on"
        )
        if found is not None and found.phase != "backward":
            line += ". A smaller loss scale does not help here: look at the batch, or use precision: bf16-mixed"
        elif self._in_a_row >= MANY_SKIPS:
            line += f". {self._in_a_row} steps in a row now; if it does not stop, use precision: bf16-mixed"
        _log.info(line)

    def look_at_scale(self, model: LightningModule, scaler: torch.amp.GradScaler) -> None:
        """For fused optimizers, which skip on the device: waiting for their flag each step would cost time."""
        self._fused_steps += 1
        if self._fused_steps > 1 and self._fused_steps % FUSED_OPTIMIZER_CHECK:
            return
        before, self._fused_scale = self._fused_scale, scaler.get_scale()
        if before > self._fused_scale:
            rank_zero_info(
                f"the loss scale fell from {before:g} to {self._fused_scale:g} in the {FUSED_OPTIMIZER_CHECK} steps up"
                f" to step {model.trainer.global_step + 1}: some were skipped because a gradient was not finite; to see"
                " which module, use an optimizer with fused=False"
            )

    def _look_for(
        self, model: LightningModule, closure: Callable[[], Any], scale: float
    ) -> tuple[NonFinite | None, str]:
        """Run the step again to see where it happened, and the sentence that says it."""
        arguments, states = step_arguments(closure), self.step_states
        if arguments is not None and states is not None:

            def loss() -> Tensor | None:
                with self.forward_context(), torch.enable_grad():
                    return loss_of(model, arguments)

            try:
                with without_trace(model, states):
                    found = first_non_finite(model, loss, scale)
            except Exception as error:  # a second run is a courtesy: it must not end the training
                return None, f"a gradient is not finite (running the step again to see where: {error})"
            if found is not None:
                return found, found.sentence()
            if model.trainer.accumulate_grad_batches > 1:
                return None, "a gradient is not finite, since an earlier one of the accumulated batches"
        names = non_finite_parameters(model)
        if not names:
            return None, "a gradient is not finite"
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return None, f"the gradient of {names[0]}{others} is not finite"


def _speaks(model: LightningModule, has_found: bool) -> bool:
    """Whether this rank writes the line: the first that found the module, else rank zero. Every rank must ask."""
    rank, ranks = model.trainer.global_rank, model.trainer.world_size
    if ranks == 1 or not dist.is_initialized():
        return rank == 0
    # float32: some HCCL releases reduce no int64.
    first = torch.tensor(float(rank if has_found else ranks), device=model.device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return rank == (int(first) if int(first) < ranks else 0)
