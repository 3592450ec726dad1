"""Warn of images that are black, of one colour, or not finite, with their names and the likely remedy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lightning_aigc.errors import ImageWarning
from lightning_aigc.metrics.image_problems import ImageProblem, Problem, find_image_problems

__all__ = ["REMEDIES", "ImageProblem", "check_images"]

REMEDIES: dict[Problem, str] = {
    "not finite": "an autoencoder in float16 overflows, run it in float32; if it is in float32 already, the training "
    "diverged: lower the learning rate",
    "black": "an autoencoder in float16 overflows, run it in float32; a safety checker also blackens images",
    "constant": "the training diverged or the latents are wrongly scaled: lower the learning rate and look at the "
    "image of step 0",
}
_NAMES_SHOWN = 3


@runtime_checkable
class HasImageRemedies(Protocol):
    """Says what to change when its images are broken, in its own config keys."""

    image_remedies: Mapping[Any, str]
    """By problem: `not finite`, `black`, `constant`."""


def check_images(images_N3HW: Tensor, names: list[str] | None = None, module: object = None) -> list[ImageProblem]:
    """Find broken images and warn once for each kind of problem; returns them in order.

    images_N3HW: floating point in 0..1. names: what to call each image, such as its prompt and seed. module: what
    drew them; its `image_remedies`, if it has any, name its own config keys.
    Warns: ImageWarning, whose text starts with the kind: "black", "constant" or "not finite".
    """
    problems = find_image_problems(images_N3HW, names)
    own = module.image_remedies if isinstance(module, HasImageRemedies) else {}
    for kind, remedy in (REMEDIES | dict(own)).items():
        found = [problem.name for problem in problems if problem.problem == kind]
        if found:
            shown = ", ".join(found[:_NAMES_SHOWN]) + (
                f" and {len(found) - _NAMES_SHOWN} more" * (len(found) > _NAMES_SHOWN)
            )
            warnings.warn(f"{kind} images ({len(found)} of {len(images_N3HW)}): {shown}. {remedy}", ImageWarning, 2)
    return problems
