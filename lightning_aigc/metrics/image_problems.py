"""Find generated images that cannot be right: black, of one colour, not finite, or ruined to noise or pure colours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_aigc.errors import DataError

Problem = Literal["not finite", "black", "constant"]
DARKEST_LEVEL = 2.5 / 255
"""An image whose every value lies below this is black: two 8-bit levels and their rounding."""
SMALLEST_RANGE = 2.5 / 255
"""An image whose every channel spans less than this is constant."""

Ruin = Literal["not finite", "black", "constant", "flat", "saturated", "noise"]
SMALLEST_DEVIATION = 0.02
"""An image whose values deviate by less is flat."""
MOST_PURE = 0.5
"""Share of pixels of one pure colour, with a channel at 0 and another at 1, above which an image is saturated."""
LEAST_CORRELATION = 0.2
"""Correlation of neighbouring pixels below which an image is noise; photographs of gravel at 64 px have 0.31."""


@dataclass(frozen=True)
class ImageProblem:
    """One image and what is wrong with it."""

    index: int
    """Its place in the batch."""
    name: str
    """The caller's name for the image, such as a prompt and a seed."""
    problem: Problem


def find_image_problems(images_N3HW: Tensor, names: list[str] | None = None) -> list[ImageProblem]:
    """Find images that are black, constant or not finite, with the worst problem of each.

    images_N3HW: floating point in 0..1. One device synchronisation for the whole batch.
    """
    require_images(images_N3HW, "images")
    names = names if names is not None else [f"image {index}" for index in range(len(images_N3HW))]
    if len(names) != len(images_N3HW):
        raise DataError(f"got {len(names)} names for {len(images_N3HW)} images; wanted one each")
    if len(images_N3HW) == 0:
        return []
    flat_N3P = images_N3HW.detach().flatten(2).float()
    lowest_N3, highest_N3 = flat_N3P.nan_to_num().aminmax(dim=2)
    flags_3N = torch.stack(
        [
            ~flat_N3P.isfinite().all(dim=2).all(dim=1),
            (highest_N3 < DARKEST_LEVEL).all(dim=1),
            (highest_N3 - lowest_N3 < SMALLEST_RANGE).all(dim=1),
        ]
    )
    order: tuple[Problem, ...] = ("not finite", "black", "constant")
    return [
        ImageProblem(index, names[index], next(problem for problem, flag in zip(order, flags, strict=True) if flag))
        for index, flags in enumerate(flags_3N.T.tolist())
        if any(flags)
    ]


def find_ruined(images_N3HW: Tensor) -> dict[int, Ruin]:
    """The images that a training ruined, by index: those of `find_image_problems`, and flat, saturated and noise.

    A brand may want such a look, so this is for comparison with what the base drew, not for a warning.

    images_N3HW: floating point in 0..1.
    """
    found: dict[int, Ruin] = {problem.index: problem.problem for problem in find_image_problems(images_N3HW)}
    images = images_N3HW.detach().float().nan_to_num()
    is_pure = (images.amax(1) > 1 - DARKEST_LEVEL) & (images.amin(1) < DARKEST_LEVEL)
    flags: dict[Ruin, Tensor] = {
        "flat": images.flatten(1).std(1) < SMALLEST_DEVIATION,
        "saturated": is_pure.flatten(1).float().mean(1) > MOST_PURE,
        "noise": _neighbour_correlation(images) < LEAST_CORRELATION,
    }
    for kind, flags_N in flags.items():
        for index in flags_N.nonzero().flatten().tolist():
            found.setdefault(index, kind)
    return found


def _neighbour_correlation(images_N3HW: Tensor) -> Tensor:
    """Correlation [N] of the luminance of pixels next to and above one another."""
    centred = images_N3HW.mean(1)
    centred = centred - centred.mean((1, 2), keepdim=True)
    variance = centred.square().mean((1, 2)).clamp_min(1e-8)
    across = (centred[:, :, 1:] * centred[:, :, :-1]).mean((1, 2))
    down = (centred[:, 1:] * centred[:, :-1]).mean((1, 2))
    return (across + down) / 2 / variance


def require_images(images: Tensor, argument: str) -> None:
    """Raise a DataError unless `images` is a floating-point [N, 3, H, W]."""
    if not isinstance(images, Tensor):
        raise DataError(f"got {argument} of type {type(images).__name__}; wanted a tensor [N, 3, H, W] in 0..1")
    if images.ndim != 4 or images.shape[1] != 3:
        raise DataError(f"got {argument} of shape {list(images.shape)}; wanted [N, 3, H, W] in 0..1")
    if not images.is_floating_point():
        raise DataError(f"got {argument} of {images.dtype}; wanted floating point in 0..1: divide by 255")
