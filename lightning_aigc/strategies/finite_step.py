"""Optimizer steps that all ranks take or none takes: a gradient that is not finite on one rank skips the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_aigc._lightning import rank_zero_info, rank_zero_warn
from lightning_aigc.sharding.local_parts import gradient_norm, is_finite


@contextmanager
def replaced_step(optimizer: Optimizer, step: Callable[..., Any]) -> Iterator[None]:
    """Replace `optimizer.step` within the block."""
    instance_step = vars(optimizer).get("step")
    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if instance_step is None:
            del optimizer.step
        else:
            optimizer.step = instance_step  # type: ignore[method-assign]  # a learning rate schedule's wrapper


def are_gradients_finite(optimizer: Optimizer) -> bool:
    """Whether all gradients of an optimizer are finite, the same on every rank. Collective for sharded gradients."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not gradients or is_finite(gradient_norm(gradients))


class StepCount:
    """Steps of one fit that were taken, and those that all ranks skipped."""

    def __init__(self) -> None:
        self.taken = self.skipped = 0

    def note(self, *, finite: bool) -> bool:
        """Count one step, and return whether it is taken."""
        self.taken += finite
        self.skipped += not finite
        return finite

    def report(self, label: str) -> None:
        """Log at the end of a fit how many steps were skipped, if any."""
        if self.skipped:
            steps = self.taken + self.skipped
            rank_zero_info(f"{label}: {self.skipped} of {steps} steps skipped for gradients that are not finite")
        self.warn_if_none_taken(label)

    def warn_if_none_taken(self, label: str) -> None:
        """Warn at the end of a fit if all of its steps were skipped."""
        if self.skipped and not self.taken:
            rank_zero_warn(
                f"{label}: no step was taken, because no step's gradients were finite, so nothing was trained; lower"
                " the learning rate, or let GradientHealthMonitor in trainer.callbacks name the layer"
            )


@contextmanager
def skip_unless_finite(optimizer: Optimizer, is_finite: Callable[[], bool], count: StepCount) -> Iterator[None]:
    """Within the block, `optimizer.step(closure)` runs the closure and steps only if all gradients are finite.

    Args:
        is_finite: the answer, the same on every rank; called once, after the closure.
        count: counts it.
    """
    step = optimizer.step

    def step_if_finite(closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        if closure is None:  # a loss scaler has looked at the gradients already
            return step(**arguments)
        result = closure()
        return step(lambda: result, **arguments) if count.note(finite=is_finite()) else result

    with replaced_step(optimizer, step_if_finite):
        yield
