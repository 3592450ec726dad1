"""What every step reads from the device, with one wait."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from lightning_aigc.callbacks.health.course import Course
from lightning_aigc.callbacks.health.measurement import Look, Named, gradients_of, norms, sample_rows
from lightning_aigc.callbacks.health.parcel import Parcel

PROBED, PROBE_SAMPLES = 64, 16
"""Gradients, and values of each, of the sample that says whether all are finite where their norms would take too long.
Backward carries what is not finite on to everything before it."""
GRADIENT = operator.attrgetter("grad")


class Gradients:
    """The gradients of one optimizer's parameters. What does not change from step to step is looked up once.

    Args:
        named: The parameters.
        is_exact: Whether to take all of them, and not a sample.
    """

    def __init__(self, named: Named, is_exact: bool) -> None:
        self.named, self.is_exact = named if is_exact else named[:: max(1, len(named) // PROBED)], is_exact
        self._parameters = [p for _, p in self.named]
        self._dtypes = {p.dtype for p in self._parameters}  # a gradient has its parameter's
        self._may_be_sparse = True

    @torch.no_grad()
    def size_or_probe(self, is_due: bool) -> Tensor | None:
        """The norm of all gradients, or for large models a number that is finite if a sample of them is.

        Whether a gradient is sparse is asked at a look, and at the first step.
        """
        if is_due or self._may_be_sparse:
            gradients = gradients_of(self.named)
            self._may_be_sparse = any(g.is_sparse for p in self._parameters if (g := p.grad) is not None)
        else:
            gradients = [g for g in map(GRADIENT, self._parameters) if g is not None]
        if not gradients:
            return None
        if self.is_exact:
            norm: Tensor = torch.linalg.vector_norm(norms(gradients, self._dtypes))
            return norm
        return sample_rows(gradients, PROBE_SAMPLES).sum()


def read_step(
    course: Course,
    full: Look | None,
    frozen: Tensor | None,
    *,
    gradients: Gradients,
    loss: Tensor | None,
    examples: tuple[Tensor, Tensor] | None,
    scale: Tensor | None,
) -> dict[str, list[float]]:
    """The step's numbers by name, on the host; `frozen` and `full` are of a look."""
    parcel = Parcel()
    parcel.add("loss", loss)
    parcel.add("scale", scale)
    parcel.add("gradient", gradients.size_or_probe(full is not None))
    parcel.add("ratios", course.ratios)
    if examples is not None:
        parcel.add("losses", examples[0])
        parcel.add("timesteps", examples[1])
    if full is not None:
        parcel.add("look", full.numbers)
        parcel.add("frozen", frozen)
    return parcel.open()
