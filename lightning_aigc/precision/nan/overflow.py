"""SkippedSteps: log steps that a dynamic loss scale skipped, with the overflowing module, the scale and advice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_aigc._lightning import LightningModule, rank_zero_info, rank_zero_logger
from lightning_aigc.precision.nan.non_finite import NonFinite, non_finite_parameters
from lightning_aigc.precision.nan.replay import find_non_finite, step_arguments
from lightning_aigc.rng import RandomStates

MANY_SKIPS = 5
"""Consecutive skipped steps from which the log line adds advice."""

_log = logging.getLogger(rank_zero_logger())  # where rank_zero_info writes


class SkippedSteps:
    """Counts skipped steps and logs a line for each.

    Args:
        forward_context: The autocast context of a training step.
    """

    def __init__(self, forward_context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.forward_context = forward_context
        self.step_states: RandomStates | None = None
        """Random states at the start of the last training step; None if it cannot be replayed."""
        self._in_a_row = 0
        self._known_scale: float | None = None
        self._scale_copy: tuple[Tensor, Any] | None = None

    def note_step_taken(self) -> None:
        """Reset the count of consecutive skipped steps."""
        self._in_a_row = 0

    def reset(self) -> None:
        """Drop the state of a finished run."""
        self._in_a_row = 0
        self.step_states = None
        self._scale_copy = None

    def report(self, model: LightningModule, closure: Callable[[], Any], scaler: torch.amp.GradScaler) -> None:
        """Log where the step that was just skipped overflowed. A collective; a single rank logs."""
        self._in_a_row += 1
        after = scaler.get_scale()
        before = after / scaler.get_backoff_factor()
        found, reason = self._locate(model, closure, before)
        if not _logs_here(model, found is not None):
            return
        line = (
            f"step {model.trainer.global_step + 1} skipped: {reason}; the weights stay as they were, the loss scale"
            f" goes from {before:g} to {after:g}, training continues"
        )
        if found is not None and found.phase != "backward":
            line += ". A smaller loss scale does not help here: look at the batch, or use precision: bf16-mixed"
        elif self._in_a_row >= MANY_SKIPS:
            line += f". {self._in_a_row} steps in a row now; if it does not stop, use precision: bf16-mixed"
        _log.info(line)

    def check_scale(self, model: LightningModule, scaler: torch.amp.GradScaler) -> None:
        """Log a reduced loss scale without synchronising, for fused optimizers, which skip steps on the device."""
        scale = scaler._scale
        if scale is None:
            return
        if scale.device.type == "cpu":
            self._compare(model, scaler, scale.item())
            return
        if self._scale_copy is not None:
            copy, arrived = self._scale_copy
            if not arrived.query():
                return
            self._compare(model, scaler, copy.item())
        arrived = torch.get_device_module(scale.device).Event()
        self._scale_copy = scale.to("cpu", non_blocking=True), arrived
        arrived.record()

    def _compare(self, model: LightningModule, scaler: torch.amp.GradScaler, scale: float) -> None:
        before = scaler._init_scale if self._known_scale is None else self._known_scale
        self._known_scale = scale
        if before > scale:
            rank_zero_info(
                f"the loss scale fell from {before:g} to {scale:g} by step {model.trainer.global_step + 1}: a step was"
                " skipped because a gradient was not finite; to see which module, use an optimizer with fused=False"
            )

    def _locate(self, model: LightningModule, closure: Callable[[], Any], scale: float) -> tuple[NonFinite | None, str]:
        """Replay the step; return where it overflowed, and a sentence about it."""
        arguments, states = step_arguments(closure), self.step_states
        if arguments is not None and states is not None:
            found, why_not = find_non_finite(model, arguments, states, scale, self.forward_context)
            if why_not:
                return None, f"a gradient is not finite (running the step again to see where: {why_not})"
            if found is not None:
                return found, found.sentence()
        names = non_finite_parameters(model)
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        sentence = f"the gradient of {names[0]}{others} is not finite" if names else "a gradient is not finite"
        # The replayed last batch is finite, so an earlier accumulated batch overflowed.
        earlier = states is not None and arguments is not None and model.trainer.accumulate_grad_batches > 1
        return None, sentence + (", since an earlier one of the accumulated batches" if earlier else "")


def _logs_here(model: LightningModule, has_found: bool) -> bool:
    """Whether this rank logs: the first rank that found the module, else rank zero. A collective."""
    rank, ranks = model.trainer.global_rank, model.trainer.world_size
    if ranks == 1 or not dist.is_initialized():
        return rank == 0
    # float32, because some HCCL releases cannot reduce int64.
    first = torch.tensor(float(rank if has_found else ranks), device=model.device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return rank == (int(first) if int(first) < ranks else 0)
