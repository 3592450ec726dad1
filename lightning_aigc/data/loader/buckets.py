"""Aspect-ratio buckets: the allowed batch shapes, and how an image is scaled and cropped to fit its bucket."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from lightning_aigc.errors import DataError


@dataclass(frozen=True)
class BucketSettings:
    """Bucket settings with the names and meaning of kohya's sd-scripts; every size is in pixels."""

    resolution: int = 512
    enable_bucket: bool = True
    min_bucket_reso: int = 256
    max_bucket_reso: int = 1024
    bucket_reso_steps: int = 64
    bucket_no_upscale: bool = False

    def __post_init__(self) -> None:
        for key in ("resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps"):
            value = getattr(self, key)
            if value < 8 or value % 8:
                near = max(8, round(value / 8) * 8)
                raise DataError(
                    f"data.init_args.{key} must be a positive multiple of 8 (the VAE's step), got {value}; use {near}"
                )
        if self.min_bucket_reso > self.max_bucket_reso:
            raise DataError(
                f"data.init_args.min_bucket_reso is {self.min_bucket_reso} and max_bucket_reso {self.max_bucket_reso};"
                f" set data.init_args.max_bucket_reso: {self.min_bucket_reso} or more"
            )

    def remedy(self, step: int) -> str:
        """Settings that make the sides of all buckets multiples of `step` pixels."""
        keys = ("bucket_reso_steps", "resolution") if self.enable_bucket else ("resolution",)
        wrong = [(key, -(-value // step) * step) for key in keys if (value := getattr(self, key)) % step]
        return "set " + " and ".join(f"data.init_args.{key}: {value}" for key, value in wrong)

    def finer(self) -> list[BucketSettings]:
        """Settings with more buckets than these, those with the fewest and the smallest changes first.

        Steps stay at 16 or more, which every model takes.
        """
        steps = dict.fromkeys([self.bucket_reso_steps, *(n for n in (32, 16) if n < self.bucket_reso_steps)])
        lowest = dict.fromkeys([self.min_bucket_reso, *(n for n in (128, 64, 32) if n < self.min_bucket_reso)])
        found = [
            replace(self, enable_bucket=True, bucket_reso_steps=step, min_bucket_reso=low, max_bucket_reso=high)
            for high in (self.max_bucket_reso, 2 * self.max_bucket_reso)
            for low in lowest
            for step in steps
        ]
        return sorted((f for f in found if f != self), key=lambda settings: len(settings._changed(self)))

    def changes(self, before: BucketSettings) -> str:
        """The settings that differ from others, as a configuration has them."""
        rows = self._changed(before).items()
        return " and ".join(f"data.init_args.{key}: {str(value).lower()}" for key, value in rows)

    def _changed(self, before: BucketSettings) -> dict[str, int]:
        old = asdict(before)
        return {key: value for key, value in asdict(self).items() if value != old[key]}

    @property
    def side_limits(self) -> tuple[int, int]:
        """The smallest and largest side: the configured limits, widened to include other shapes than the square."""
        steps = self.bucket_reso_steps
        low, high = self.min_bucket_reso, self.max_bucket_reso
        if low >= self.resolution:  # else the square would be the only bucket
            low = min(self.resolution, max(steps, self.resolution // 2 // steps * steps))
        return low, high if high >= self.resolution else 2 * self.resolution


@dataclass(frozen=True)
class Placement:
    """Scale and crop of an image for its bucket; all sizes in pixels of the scaled image."""

    width: int
    height: int
    scaled_width: int
    scaled_height: int

    @property
    def spare(self) -> tuple[int, int]:
        """Pixels (x, y) that the crop removes."""
        return self.scaled_width - self.width, self.scaled_height - self.height

    @property
    def cropped_fraction(self) -> float:
        """The share of the image's area that the crop removes."""
        return 1 - (self.width * self.height) / (self.scaled_width * self.scaled_height)


def bucket_shapes(settings: BucketSettings) -> list[tuple[int, int]]:
    """All (width, height) buckets in steps with an area of at most resolution^2, sorted; always with the square.

    Source: kohya-ss/sd-scripts, library/model_util.py, make_bucket_resolutions.
    """
    shapes = {(settings.resolution, settings.resolution)}
    if settings.enable_bucket:
        low, high = settings.side_limits
        steps = settings.bucket_reso_steps
        for side in range(math.ceil(low / steps) * steps, high + 1, steps):
            other = min(high // steps * steps, settings.resolution**2 // side // steps * steps)
            if other >= low:
                shapes |= {(side, other), (other, side)}
    return sorted(shapes)


def place(width: int, height: int, settings: BucketSettings, shapes: list[tuple[int, int]]) -> Placement:
    """Place an image in the bucket with the nearest aspect ratio."""
    if settings.enable_bucket and settings.bucket_no_upscale:
        return place_in(width, height, _shape_without_upscale(width, height, settings))
    aspect = math.log(width / height)
    return place_in(width, height, min(shapes, key=lambda shape: (abs(aspect - math.log(shape[0] / shape[1])), shape)))


def place_in(width: int, height: int, shape: tuple[int, int]) -> Placement:
    """Place an image in a given bucket."""
    scale = max(shape[0] / width, shape[1] / height)
    return Placement(*shape, max(shape[0], round(width * scale)), max(shape[1], round(height * scale)))


def _shape_without_upscale(width: int, height: int, settings: BucketSettings) -> tuple[int, int]:
    steps = settings.bucket_reso_steps
    high = max(steps, settings.side_limits[1] // steps * steps)
    scale = min(1.0, math.sqrt(settings.resolution**2 / (width * height)))
    # Rounded to whole pixels first, as kohya does: 520 * (512 / 520) is 511.999..., which is 512.
    sides = (round(side * scale) // steps * steps for side in (width, height))
    return tuple(min(high, max(steps, side)) for side in sides)  # type: ignore[return-value]
