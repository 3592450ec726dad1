"""Material: what the data checks look at, and the images of a few samples, decoded once for all checks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_aigc.data.images.crop import Sample, crop_offset, load_pixels
from lightning_aigc.data.loader.buckets import BucketSettings

LOOKED_AT = 48
"""Images that are decoded; more would make the report of a large folder slow."""


@dataclass(frozen=True)
class Material:
    """The user's images without class images, and what the run will do with them."""

    samples: Sequence[Sample]
    trigger_word: str | None = None
    prompts: Sequence[str] = ()
    """Prompts that the run will sample; empty without a Trainer."""
    pictures_in_training: int | None = None
    """Optimizer steps times user images in a step; None where the number of steps is unknown."""
    enable_bucket: bool = True

    @functools.cached_property
    def looked_at(self) -> list[Sample]:
        """Samples evenly spread over the folder."""
        count = min(LOOKED_AT, len(self.samples))
        return [self.samples[i * len(self.samples) // count] for i in range(count)]

    @functools.cached_property
    def pixels(self) -> list[NDArray[np.uint8]]:
        """The images of `looked_at` as training sees them, RGB [H, W, 3]."""
        return [load_pixels(sample, crop_offset(sample.placement))[0] for sample in self.looked_at]


def material_of_run(
    index: Any, trainer: Any, trigger_word: str | None, train_batch_size: int, buckets: BucketSettings
) -> Material:
    """The material of a TrainingIndex; steps and prompts are the Trainer's and its module's, if there is one."""
    module = getattr(trainer, "lightning_module", None)
    steps: int = getattr(module, "hparams", {}).get("max_train_steps") or int(getattr(trainer, "max_steps", -1))
    at_once = train_batch_size * getattr(trainer, "world_size", 1) * getattr(trainer, "accumulate_grad_batches", 1)
    own = sorted({row for bucket in index.buckets for row in bucket})
    return Material(
        [index.samples[row] for row in own],
        trigger_word,
        list(getattr(module, "validation_prompts", None) or ()),
        steps * at_once if steps > 0 else None,
        buckets.enable_bucket,
    )


def named(names: Sequence[str], shown: int = 3) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
