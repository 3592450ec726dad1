"""Load the pixels and mask of one sample, scaled and cropped to its bucket, before any flip."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lightning_aigc.data.images.image_file import PictureRejectedError, load_condition, load_mask, load_picture
from lightning_aigc.data.loader.buckets import Placement
from lightning_aigc.errors import DataError


@dataclass(frozen=True)
class SourceImage:
    """An image that an edit starts from, and its cut."""

    path: Path
    content_sha256: str
    placement: Placement


@dataclass(frozen=True)
class Sample:
    """One training image. `original_size` is (height, width) in pixels after EXIF rotation."""

    path: Path
    name: str
    caption: str
    content_sha256: str
    original_size: tuple[int, int]
    placement: Placement
    bucket: int
    mask: Path | None = None
    is_prior: bool = False
    condition: Path | None = None
    sources: tuple[SourceImage, ...] = ()
    """Images that an edit starts from."""
    description: str | None = None
    """Description of the image of an edit, whose caption is the instruction."""

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of the image and of each source: examples of one batch have equal ones."""
        return tuple((p.width, p.height) for p in (self.placement, *(s.placement for s in self.sources)))


def crop_offset(placement: Placement, across: float = 0.5, down: float = 0.5) -> tuple[int, int]:
    """The crop's (left, top); `across` and `down` in [0, 1) select an offset, 0.5 the centre."""
    x, y = placement.spare
    if across == down == 0.5:
        return x // 2, y // 2
    return int(across * (x + 1)), int(down * (y + 1))


def load_pixels(
    sample: Sample, left_top: tuple[int, int], use_alpha_mask: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Load RGB [H, W, 3] and the sample's mask [H, W], None without a mask; both 0..255.

    Raises: DataError naming a file that can no longer be read.
    """
    placement = sample.placement
    try:
        picture, alpha = load_picture(sample.path, shrink_to=(placement.scaled_width, placement.scaled_height))
    except (Exception, PictureRejectedError) as error:
        raise DataError(_gone(sample.path, error)) from error
    pixels = np.asarray(_cut(picture, placement, left_top))
    if sample.mask is None and use_alpha_mask and alpha is not None and not sample.is_prior:
        return pixels, np.asarray(_cut(alpha, placement, left_top))
    return pixels, load_mask_pixels(sample, left_top)


def _gone(path: Path, error: Exception) -> str:
    return f"{path} was readable when training began and is not any more ({error}); put it back, and resume the run"


def load_mask_pixels(sample: Sample, left_top: tuple[int, int]) -> NDArray[np.uint8] | None:
    """Load the sample's mask file [H, W], cropped like its image; None without a mask file."""
    if sample.mask is None:
        return None
    try:
        return np.asarray(_cut(load_mask(sample.mask), sample.placement, left_top))
    except (Exception, PictureRejectedError) as error:
        raise DataError(f"the mask {sample.mask} cannot be read: {error}") from error


def load_condition_pixels(sample: Sample, left_top: tuple[int, int]) -> NDArray[np.uint8]:
    """Load the sample's condition RGB [H, W, 3], cropped like its image.

    Scaled by area, and repeated where it grows: lines of one pixel are neither ringed nor blurred.
    """
    assert sample.condition is not None
    try:
        picture = load_condition(sample.condition)
    except (Exception, PictureRejectedError) as error:
        raise DataError(f"the condition {sample.condition} cannot be read: {error}") from error
    return np.asarray(_cut(picture, sample.placement, left_top, Image.Resampling.BOX))


def load_source_pixels(sample: Sample, number: int, left_top: tuple[int, int]) -> NDArray[np.uint8]:
    """Load a source RGB [H, W, 3]: with the image's cut where it has the image's placement, else from the middle.

    Raises: DataError naming a file that can no longer be read.
    """
    source = sample.sources[number]
    placement = source.placement
    if placement != sample.placement:
        left_top = crop_offset(placement)
    try:
        picture, _ = load_picture(source.path, shrink_to=(placement.scaled_width, placement.scaled_height))
    except (Exception, PictureRejectedError) as error:
        raise DataError(_gone(source.path, error)) from error
    return np.asarray(_cut(picture, placement, left_top))


def _cut(
    image: Image.Image,
    placement: Placement,
    left_top: tuple[int, int],
    resampling: Image.Resampling = Image.Resampling.LANCZOS,
) -> Image.Image:
    """Scale and crop in one step, so that only the cropped pixels are computed, even for extreme aspect ratios."""
    x_scale, y_scale = image.width / placement.scaled_width, image.height / placement.scaled_height
    left, top = left_top[0] * x_scale, left_top[1] * y_scale
    right = min(image.width, left + placement.width * x_scale)
    bottom = min(image.height, top + placement.height * y_scale)
    size = (placement.width, placement.height)
    if size == image.size:
        return image
    return image.resize(size, resampling, box=(left, top, right, bottom))
