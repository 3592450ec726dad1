"""Optimizer steps that all ranks take or none: a step is skipped where a rank's gradients were not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_aigc.gradient_sync.base import Sync


@contextmanager
def skip_unless_finite(optimizer: Optimizer, sync: Sync) -> Iterator[None]:
    """Make `optimizer.step(closure)` run the closure, and step only if the gradients are finite on every rank."""
    step, own = optimizer.step, vars(optimizer).get("step")

    def step_if_finite(closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        if closure is None:  # a loss scaler has looked at the gradients already
            return step(**arguments)
        result = closure()
        report = sync.finish_step()
        return step(lambda: result, **arguments) if report is None or report.finite else result

    optimizer.step = step_if_finite  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]  # a learning rate schedule's wrapper
