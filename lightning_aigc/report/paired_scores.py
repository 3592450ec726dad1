"""Compare the scores of the same prompts and seeds between two steps of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MEMORISING_CHECKS = 3
"""Checks over which one score must rise and the other fall before that is reported."""


MEANS = {"mean": ("clip_t", "clip_i"), "edit": ("direction", "kept")}
"""Metrics that are the mean of two scores."""


@dataclass(frozen=True)
class Check:
    """The scores of one step's images, in the order of the prompts and seeds."""

    step: int
    named: dict[str, list[float]] = field(default_factory=dict)
    """By name: clip_t and clip_i, which is NaN without reference images; of edits direction and kept, and clip_t, which
    is NaN without a description of the target."""

    def scores(self, metric: str) -> list[float]:
        """Each image's score of this name, or the mean of two for a name of MEANS. Empty for one that is not there."""
        if metric in MEANS:
            return [sum(each) / len(each) for each in zip(*(self.named[name] for name in MEANS[metric]), strict=True)]
        return self.named.get(metric, [])

    def mean(self, metric: str) -> float:
        scores = self.scores(metric)
        return sum(scores) / len(scores)


def improvement(now: Sequence[float], before: Sequence[float]) -> tuple[float, float]:
    """Improvement of images of the same prompts and seeds: the mean difference and its standard error.

    Pairing removes most of the noise: a prompt that scores low does so at every step.
    """
    differences = [a - b for a, b in zip(now, before, strict=True)]
    mean = sum(differences) / len(differences)
    if len(differences) < 2:
        return mean, 0.0
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return mean, math.sqrt(variance / len(differences))


def memorising(before: Check, check: Check) -> str | None:
    """A warning if CLIP-T or CLIP-I clearly rises while the other falls; else None."""
    if "clip_t" not in check.named or "clip_i" not in check.named:
        return None
    text, text_noise = improvement(check.scores("clip_t"), before.scores("clip_t"))
    image, image_noise = improvement(check.scores("clip_i"), before.scores("clip_i"))
    clear = abs(text) > text_noise and abs(image) > image_noise  # never with a NaN
    if not clear or text * image >= 0:
        return None
    rising, falling = ("clip_t", "clip_i") if text > 0 else ("clip_i", "clip_t")
    meaning = (
        "images follow the words but leave the look of the training images"
        if rising == "clip_t"
        else "images grow like the training images and follow the words less: the model memorises"
    )
    return (
        f"since step {before.step} {rising} rises while {falling} falls ({text:+.3f} clip_t, {image:+.3f} clip_i):"
        f" {meaning}. Lower model.init_args.learning_rate or rank, or stop here"
    )
