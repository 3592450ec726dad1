"""The pixels and the mask of one sample as training sees them: scaled, cropped, not yet flipped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lightning_aigc.data.buckets import Placement
from lightning_aigc.data.image_file import PictureRejectedError, load_mask, load_picture
from lightning_aigc.errors import DataError


@dataclass(frozen=True)
class Sample:
    """One picture that training uses. `original_size` is (height, width), upright, in pixels."""

    path: Path
    name: str
    caption: str
    content_sha256: str
    original_size: tuple[int, int]
    placement: Placement
    bucket: int
    mask: Path | None = None
    is_prior: bool = False


def crop_offset(placement: Placement, across: float = 0.5, down: float = 0.5) -> tuple[int, int]:
    """(left, top) of the crop; across and down in [0, 1) choose among all offsets, 0.5 is the centre."""
    x, y = placement.spare
    if across == down == 0.5:
        return x // 2, y // 2
    return int(across * (x + 1)), int(down * (y + 1))


def load_pixels(
    sample: Sample, left_top: tuple[int, int], use_alpha_mask: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """RGB [H, W, 3] and, if the sample has one, its mask [H, W]; both 0..255.

    Raises: DataError naming the file if it can no longer be read as when it was checked.
    """
    placement = sample.placement
    try:
        picture, alpha = load_picture(sample.path, shrink_to=(placement.scaled_width, placement.scaled_height))
    except (Exception, PictureRejectedError) as error:
        raise DataError(f"{sample.path} could be read when training began and cannot any more: {error}") from error
    pixels = np.asarray(_cut(picture, placement, left_top))
    if sample.mask is None and use_alpha_mask and alpha is not None and not sample.is_prior:
        return pixels, np.asarray(_cut(alpha, placement, left_top))
    return pixels, load_mask_pixels(sample, left_top)


def load_mask_pixels(sample: Sample, left_top: tuple[int, int]) -> NDArray[np.uint8] | None:
    """The sample's mask file [H, W], cropped like its picture; None if it has none."""
    if sample.mask is None:
        return None
    try:
        return np.asarray(_cut(load_mask(sample.mask), sample.placement, left_top))
    except (Exception, PictureRejectedError) as error:
        raise DataError(f"the mask {sample.mask} cannot be read: {error}") from error


def _cut(image: Image.Image, placement: Placement, left_top: tuple[int, int]) -> Image.Image:
    """Scale and crop in one step: only the part that is kept gets computed, however long and thin the picture."""
    x_scale, y_scale = image.width / placement.scaled_width, image.height / placement.scaled_height
    left, top = left_top[0] * x_scale, left_top[1] * y_scale
    right = min(image.width, left + placement.width * x_scale)
    bottom = min(image.height, top + placement.height * y_scale)
    size = (placement.width, placement.height)
    if size == image.size:
        return image
    return image.resize(size, Image.Resampling.LANCZOS, box=(left, top, right, bottom))
