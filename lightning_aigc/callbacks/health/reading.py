"""What every step reads from the device, with one wait."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_aigc.callbacks.health.course import Course
from lightning_aigc.callbacks.health.measurement import Look, Named, gradients_of, norms, sample_rows
from lightning_aigc.callbacks.health.parcel import Parcel

PROBED, PROBE_SAMPLES = 64, 16
"""Gradients, and values of each, of the sample that says whether all are finite where their norms would take too long.
Backward carries what is not finite on to everything before it."""


def read_step(
    course: Course,
    full: Look | None,
    frozen: Tensor | None,
    *,
    is_exact: bool,
    loss: Tensor | None,
    examples: tuple[Tensor, Tensor] | None,
    scale: Tensor | None,
) -> dict[str, list[float]]:
    """The step's numbers by name, on the host; `frozen` and `full` are of a look."""
    parcel = Parcel()
    parcel.add("loss", loss)
    parcel.add("scale", scale)
    parcel.add("gradient", _size_or_probe(course.named, is_exact))
    parcel.add("ratios", course.ratios)
    if examples is not None:
        parcel.add("losses", examples[0])
        parcel.add("timesteps", examples[1])
    if full is not None:
        parcel.add("look", full.numbers)
        parcel.add("frozen", frozen)
    return parcel.open()


def _size_or_probe(named: Named, is_exact: bool) -> Tensor | None:
    """The norm of all gradients, or for large models a number that is finite if a sample of them is."""
    gradients = gradients_of(named if is_exact else named[:: max(1, len(named) // PROBED)])
    if not gradients:
        return None
    if is_exact:
        norm: Tensor = torch.linalg.vector_norm(norms(gradients))
        return norm
    return sample_rows(gradients, PROBE_SAMPLES).sum()
