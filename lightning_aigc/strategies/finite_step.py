"""Optimizer steps that all ranks take or none: a step is skipped where a rank's gradients were not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


@contextmanager
def replaced_step(optimizer: Optimizer, step: Callable[..., Any]) -> Iterator[None]:
    """Make `optimizer.step` another function in the block, and what it was after it."""
    own = vars(optimizer).get("step")
    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]  # a learning rate schedule's wrapper


@contextmanager
def skip_unless_finite(optimizer: Optimizer, is_finite: Callable[[], bool]) -> Iterator[None]:
    """Make `optimizer.step(closure)` run the closure, and step only if the gradients are finite on every rank.

    Args: is_finite: whether they are, the same answer on every rank; asked once, after the closure.
    """
    step = optimizer.step

    def step_if_finite(closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        if closure is None:  # a loss scaler has looked at the gradients already
            return step(**arguments)
        result = closure()
        return step(lambda: result, **arguments) if is_finite() else result

    with replaced_step(optimizer, step_if_finite):
        yield
