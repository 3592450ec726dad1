"""Interface of a check: it reads a step's numbers and returns findings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from lightning_aigc.callbacks.health.alerts.alerts import CheckName, Finding, Policy
from lightning_aigc.callbacks.health.parameter_stats import Named
from lightning_aigc.callbacks.health.step_reading import BatchedReadback, StepReading


@dataclass(frozen=True)
class Findings:
    """A check's findings and the layers that it examined; an earlier finding there that is absent now has ended."""

    found: Sequence[Finding]
    checked: Collection[CheckName]
    """The names it looked for, found or not."""
    layers: Collection[str] | None = None
    """The layers it looked at; None means all."""
    step: int | None = None
    """The optimizer step that was judged, where it is not the one that was read."""


class Check(ABC):
    """A check of a training's steps; `checks.STEP_CHECKS` lists all of them."""

    policies: ClassVar[Mapping[CheckName, Policy]]
    """The names of its findings, and how they become alerts."""
    runs_on_bad_steps: ClassVar[bool] = False
    """Whether it also runs at a step whose loss or gradients are not finite."""
    state_key: ClassVar[str] = ""
    """Its key in a checkpoint; empty for a check without a state of its own."""

    def attach(self, model: nn.Module, trained: Named, frozen: Named) -> None:  # noqa: B027  most need nothing
        """Keep what the check needs of the model, as it is when training starts."""

    def request(self, readback: BatchedReadback, *, is_due: bool) -> None:  # noqa: B027  most need nothing
        """Add tensors to what is read from the device at this step; `run` finds them in `reading.numbers`."""

    @abstractmethod
    def run(self, reading: StepReading) -> Findings | None:
        """Judge one step; None where this check does not look at it."""

    def state(self) -> Any:
        """Return what a checkpoint keeps under `state_key`."""
        return None

    def load(self, state: Any) -> None:  # noqa: B027  most have no state
        """Load what `state` returned."""
