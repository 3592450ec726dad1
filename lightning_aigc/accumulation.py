"""AccumulationWindow: gradient accumulation for a plain loop, as the mean over the actual number of micro-batches.

Legend: a window is the micro-batches between two optimizer steps; an epoch's last window may be partial.

    window = AccumulationWindow(optimizer, micro_batches=8, max_norm=1.0)
    for epoch in range(epochs):
        for batch in loader:
            with window.accumulating():                 # DDP reduces gradients in the last micro-batch only
                window.backward(loss_of(batch))
            window.step()                               # steps when the window is full
        window.end_epoch()                              # or at the end of the epoch
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_aigc.errors import ConfigError


class AccumulationWindow:
    """Accumulates the mean gradient of up to `micro_batches` micro-batches, clips it, and steps.

    Each loss is divided by `micro_batches` before its backward; a partial window is scaled up to the mean once, before
    clipping, so that full windows are bit-identical to plain accumulation. The loss scale is fixed within a window,
    because gradients of different scales do not add up.

    Args:
        optimizer: The optimizer of the trained parameters.
        micro_batches: Micro-batches in a full window.
        max_norm: Norm to which the window's gradient is clipped; None for no clipping.
        scaler: A loss scaler for float16.
        crosses_epochs: Whether a window that is open at an epoch's end continues in the next epoch.
        module: The DistributedDataParallel module that reduces gradients once per window.

    Raises: ConfigError naming the wrong argument.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        micro_batches: int,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        crosses_epochs: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
            raise ConfigError(f"micro_batches must be 1 or more, got {micro_batches!r}")
        if max_norm is not None and not max_norm > 0:
            raise ConfigError(f"max_norm must be more than 0, or None for no clipping; got {max_norm!r}")
        self.optimizer, self.micro_batches, self.max_norm = optimizer, micro_batches, max_norm
        self.scaler, self.crosses_epochs, self.module = scaler, crosses_epochs, module
        self.count = 0
        """Micro-batches in the open window."""
        self.steps = 0
        """Completed windows."""

    @property
    def is_full(self) -> bool:
        return self.count == self.micro_batches

    def describe(self, batch_size: int, ranks: int = 1) -> str:
        """The effective batch size as a sentence, to print at the start."""
        return effective_batch_size(batch_size, self.micro_batches, ranks)

    @contextlib.contextmanager
    def accumulating(self, *, is_last: bool = False) -> Iterator[bool]:
        """Run forward and backward of one micro-batch in this block; yields whether it is the window's last.

        Ranks reduce gradients only in the last micro-batch. `is_last` marks the last micro-batch of the epoch.
        """
        ends = self.count + 1 == self.micro_batches or (is_last and not self.crosses_epochs)
        no_sync: Any = None if ends else getattr(self.module, "no_sync", None)
        with contextlib.nullcontext() if no_sync is None else no_sync():
            yield ends

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch."""
        if self.is_full:
            raise RuntimeError("the window is full: call step() before the next backward()")
        share = loss / self.micro_batches
        (share if self.scaler is None else self.scaler.scale(share)).backward()  # type: ignore[no-untyped-call]
        self.count += 1

    def step(self, before_step: Callable[[], None] | None = None) -> bool:
        """Take the optimizer step if the window is full. Returns: whether it did.

        Args: before_step: called once the gradients are final, right before the optimizer step.
        """
        return self._end(before_step) if self.is_full else False

    def end_epoch(self, before_step: Callable[[], None] | None = None) -> bool:
        """Take the step of a partial last window, unless windows cross epochs. Returns: whether it did."""
        return self._end(before_step) if self.count and not self.crosses_epochs else False

    def state_dict(self) -> dict[str, Any]:
        """Counts, the scaler's state, and the open window's gradients in the optimizer's order of parameters."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        parameters = self._parameters() if self.count else []
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        return {"count": self.count, "steps": self.steps, "scaler": scaler, "gradients": gradients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the open window."""
        self.count, self.steps = int(state["count"]), int(state["steps"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.optimizer.zero_grad()
        for parameter, gradient in zip(self._parameters(), state["gradients"], strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter.device).clone()

    def _end(self, before_step: Callable[[], None] | None) -> bool:
        parameters = self._parameters()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        scale_to_mean(parameters, self.count, self.micro_batches)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.max_norm)
        if before_step is not None:
            before_step()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.count = 0
        self.steps += 1
        return True

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def scale_to_mean(parameters: list[nn.Parameter], count: int, divided_by: int) -> None:
    """Rescale gradients that were divided by `divided_by` to the mean of `count`; does nothing if both are equal."""
    if count == divided_by:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, divided_by / count)


def effective_batch_size(batch_size: int, micro_batches: int, ranks: int) -> str:
    """The effective batch size as text: `64 samples a step: 4 in a batch x 8 batches x 2 rank(s)`."""
    total = batch_size * micro_batches * ranks
    return f"{total} samples a step: {batch_size} in a batch x {micro_batches} batches x {ranks} rank(s)"
