"""Conditions of a ControlNet, computed from the images themselves, on any device, without downloads.

Legend: B batch, C channels of the condition, H and W pixels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc.errors import ModelError
from lightning_aigc.metrics import canny

KEY = "model.init_args.conditions"
FOLDER = "folder"
"""Conditions that the user drew: `data.init_args.conditioning_data_dir`."""
Maker = Callable[[Tensor], Tensor]
TILE = 8
"""Side in pixels of the blocks that `tile` averages."""
INPAINT_SHARES = (0.3, 0.7)
"""Smallest and largest side of the rectangle that `inpaint` hides, as a share of the image's."""


def make_canny(pictures_B3HW: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Edges [B, 1, H, W]."""
    return canny(pictures_B3HW, *thresholds)


def make_lineart(pictures_B3HW: Tensor) -> Tensor:
    """Lines [B, 1, H, W], white on black: where a fine blur is darker or brighter than a coarse one."""
    grey = pictures_B3HW.mean(1, keepdim=True)
    difference = _blur(grey, 0.8) - _blur(grey, 2.0)
    return (4 * difference.abs()).clamp(0, 1)


def make_tile(pictures_B3HW: Tensor) -> Tensor:
    """The image [B, 3, H, W] as a blur of blocks of TILE pixels."""
    height, width = pictures_B3HW.shape[-2:]
    small = F.interpolate(pictures_B3HW, size=(max(1, height // TILE), max(1, width // TILE)), mode="area")
    return F.interpolate(small, size=(height, width), mode="bilinear", align_corners=False)


def make_inpaint(pictures_B3HW: Tensor) -> Tensor:
    """The image and, as a fourth channel, the rectangle to fill [B, 4, H, W], chosen by the image's content."""
    height, width = pictures_B3HW.shape[-2:]
    mask_B1HW = pictures_B3HW.new_zeros(len(pictures_B3HW), 1, height, width)
    for number, picture in enumerate(pictures_B3HW):
        seed = int(picture.double().mul(255).round().sum())
        low, high = INPAINT_SHARES
        draw = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
        tall, wide = (int(side * (low + (high - low) * at)) for side, at in zip((height, width), draw, strict=False))
        top, left = int(draw[2] * (height - tall + 1)), int(draw[3] * (width - wide + 1))
        mask_B1HW[number, :, top : top + tall, left : left + wide] = 1
    return torch.cat([pictures_B3HW, mask_B1HW], dim=1)


def find_maker(conditions: str, canny_thresholds: Sequence[float]) -> Maker | None:
    """The function that makes conditions of images in 0..1; None for `folder`, whose conditions are files.

    A class path names a class without arguments, or a function, that takes images float32 [B, 3, H, W] in 0..1 and
    returns conditions [B, 1 or 3, H, W] in 0..1.

    Raises: ModelError for a name that is none of these.
    """
    if not isinstance(conditions, str):
        raise ModelError(
            f"{KEY} must be a name or a class path, got {conditions!r}; a run records it, so put the function or class"
            " into a module and give its path, such as my_module.my_function"
        )
    if conditions == FOLDER:
        return None
    if conditions == "canny":
        low, high = _checked(canny_thresholds)
        return partial(make_canny, thresholds=(low, high))  # which spawned ranks can read
    makers: dict[str, Maker] = {"lineart": make_lineart, "tile": make_tile, "inpaint": make_inpaint}
    if conditions in makers:
        return makers[conditions]
    module, _, name = conditions.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{KEY}: {conditions!r} cannot be imported ({error}); check the class path") from error
    if found is None:
        raise ModelError(
            f"{KEY} must be canny, {', '.join(makers)}, {FOLDER} or a class path such as my.Depth, got {conditions!r}"
        )
    maker: Maker = found() if isinstance(found, type) else found
    return maker


def to_bytes(conditions_BCHW: Tensor, wanted: torch.Size, name: str) -> Tensor:
    """Conditions in 0..1 as bytes, uint8 [B, C, H, W]. Raises: ModelError for another shape or range."""
    shape = tuple(conditions_BCHW.shape)
    if len(shape) != 4 or shape[0] != wanted[0] or shape[2:] != tuple(wanted[2:]):
        raise ModelError(
            f"{KEY}: {name} returned {list(shape)} for images {list(wanted)}; it must return [B, 1 or 3, H, W]"
        )
    if not conditions_BCHW.isfinite().all() or conditions_BCHW.min() < 0 or conditions_BCHW.max() > 1:
        raise ModelError(f"{KEY}: {name} returned values outside 0..1, which conditions must lie in; scale them")
    return conditions_BCHW.mul(255).round().to(torch.uint8)


def from_bytes(conditions_BCHW: Tensor, channels: int, names: Sequence[str] = ()) -> Tensor:
    """Conditions as the ControlNet takes them, float32 [B, `channels`, H, W] in 0..1.

    Grey conditions are repeated; of a fourth channel, what it marks becomes -1, as diffusers' inpainting wants it.
    Raises: ModelError for colours where one channel is wanted.
    """
    values = conditions_BCHW.float() / 255
    if values.shape[1] == 4:
        values = torch.where(values[:, 3:] > 0.5, -1.0, values[:, :3])
    if values.shape[1] == channels:
        return values
    if values.shape[1] == 1:
        return values.expand(-1, channels, -1, -1)
    if channels == 1 and values.shape[1] == 3:
        coloured_B = (values.amax(1) - values.amin(1)).flatten(1).amax(1) > 0
        if coloured_B.any():
            which = int(coloured_B.nonzero()[0])
            name = names[which] if names else f"number {which} of its batch"
            raise ModelError(
                f"the condition of {name} is in colour, and this ControlNet takes one channel; make it grey"
            )
        return values[:, :1]
    raise ModelError(f"conditions have {values.shape[1]} channels, and this ControlNet takes {channels}; choose others")


def _blur(grey_B1HW: Tensor, sigma: float) -> Tensor:
    reach = min(int(3 * sigma + 0.5), *(side - 1 for side in grey_B1HW.shape[-2:]))
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float32, device=grey_B1HW.device)
    weights = torch.exp(-offsets.square() / (2 * sigma * sigma))
    weights = weights / weights.sum()
    padded = F.pad(grey_B1HW, (reach,) * 4, mode="reflect")
    return F.conv2d(padded, weights.outer(weights)[None, None])


def _checked(thresholds: Sequence[float]) -> tuple[float, float]:
    if len(thresholds) != 2 or not 0 <= thresholds[0] <= thresholds[1] <= 4:
        raise ModelError(
            f"model.init_args.canny_thresholds must be two numbers 0 <= low <= high <= 4, got {list(thresholds)}"
        )
    return float(thresholds[0]), float(thresholds[1])
