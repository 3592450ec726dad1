"""Advice on training images and captions: what they will teach that nobody asked for. Each check is one function."""

from __future__ import annotations

from collections.abc import Callable

from lightning_aigc.data.advice.backgrounds import check_backgrounds
from lightning_aigc.data.advice.captions import check_captions, check_prompts
from lightning_aigc.data.advice.dataset_summary import Material, check_batch, check_crops, check_repeats
from lightning_aigc.data.advice.faces import check_faces

CHECKS: tuple[Callable[[Material], list[str]], ...] = (
    check_captions,
    check_prompts,
    check_batch,
    check_repeats,
    check_crops,
    check_backgrounds,
    check_faces,
)
EDIT_CHECKS = (check_prompts, check_batch, check_repeats, check_crops)
"""Checks for pairs of an edit, whose captions are instructions and describe no image."""


def advice_on(material: Material) -> list[str]:
    """One sentence for each finding of all checks, with its figure and a config line; empty for healthy data."""
    is_edit = any(sample.sources for sample in material.samples)
    checks = EDIT_CHECKS if is_edit else CHECKS
    return [sentence for check in checks for sentence in check(material)]


__all__ = ["CHECKS", "Material", "advice_on"]
