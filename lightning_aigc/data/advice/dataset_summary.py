"""Material: what the data checks look at, and the images of a few samples, decoded once for all checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_aigc.data.images.crop import Sample, crop_offset, load_pixels
from lightning_aigc.data.loader.buckets import BucketSettings, bucket_shapes, place

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
    buckets: BucketSettings = field(default_factory=BucketSettings)
    batch_size: int = 1
    """User images in a batch, on each device."""
    devices: int = 1
    items: int | None = None
    """Images of an epoch, with their repeats; None where that is unknown."""

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
    devices: int = getattr(trainer, "world_size", 1)
    at_once = train_batch_size * devices * getattr(trainer, "accumulate_grad_batches", 1)
    own = sorted({row for bucket in index.buckets for row in bucket})
    return Material(
        [index.samples[row] for row in own],
        trigger_word,
        list(getattr(module, "validation_prompts", None) or ()),
        steps * at_once if steps > 0 else None,
        buckets,
        train_batch_size,
        devices,
        sum(map(len, index.buckets)),
    )


def named(names: Sequence[str], shown: int = 3) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


MOST_VIEWS = 400
"""Views of each image from which a LoRA mostly memorises. DreamBooth's own recipe, 5 images and 1000 steps with
batches of one, is 200 (arXiv:2208.12242, section 4)."""
USUAL_VIEWS = 200


def check_repeats(material: Material) -> list[str]:
    """Report images that the run shows so often that it memorises them."""
    count, shown = len(material.samples), material.pictures_in_training
    if shown is None or not count or shown / count <= MOST_VIEWS:
        return []
    return [
        f"{count} image{'s' * (count > 1)} for this many steps: each is seen {shown / count:.0f} times, and from "
        f"about {MOST_VIEWS} a LoRA memorises; add images, or train {USUAL_VIEWS * count / shown:.2g} times as long "
        "(model.init_args.max_train_steps)"
    ]


def check_batch(material: Material) -> list[str]:
    """Report a batch that is larger than the folder."""
    items, devices = material.items, material.devices
    if not items or material.batch_size * devices <= items:
        return []
    where = f" on each of {devices} devices" if devices > 1 else ""
    remedy = f"set data.init_args.train_batch_size: {max(1, items // (2 * devices))}"
    if items < 2 * devices:
        remedy = "set trainer.devices: 1"
    return [
        f"a batch takes {material.batch_size} images{where} and an epoch has {items}: every step sees them all, and "
        f"steps differ by their noise alone; {remedy}"
    ]


MOST_CROPPED = 0.2
"""Share of an image's area: a photograph of 3:2 in the nearest of kohya's buckets loses at most a tenth."""
LEAST_SHARE = 0.1
"""Share of the images that must lose that much."""


def crop_remedy(material: Material, cut: Sequence[Sample], is_cut: Callable[[Sample], bool]) -> str:
    """Settings of the buckets that end the cut: as few as possible, tried on up to LOOKED_AT of these samples.

    Where none does, the samples have to be cropped by hand.
    """
    tried = [cut[i * len(cut) // min(LOOKED_AT, len(cut))] for i in range(min(LOOKED_AT, len(cut)))]
    best, fewest = "", len(tried)
    for settings in material.buckets.finer():
        shapes = bucket_shapes(settings)
        sizes = [(sample, *sample.original_size) for sample in tried]
        placed = [replace(s, placement=place(width, height, settings, shapes)) for s, height, width in sizes]
        if (still := sum(map(is_cut, placed))) < fewest:
            best, fewest = f"set {settings.changes(material.buckets)}", still
    if not best:
        return "crop them yourself"
    return f"{best}, and crop the rest yourself" if fewest else best


def check_crops(material: Material) -> list[str]:
    """Report images that lose more than a fifth of their area to the crop."""
    cut = [sample for sample in material.samples if sample.placement.cropped_fraction > MOST_CROPPED]
    if not cut or len(cut) < LEAST_SHARE * len(material.samples):
        return []
    worst = max(cut, key=lambda sample: sample.placement.cropped_fraction)
    across, down = worst.placement.spare
    sides = "top and bottom" if down > across else "left and right"
    remedy = crop_remedy(material, cut, lambda sample: sample.placement.cropped_fraction > MOST_CROPPED)
    return [
        f"{len(cut)} of {len(material.samples)} images lose more than {MOST_CROPPED:.0%} to the crop "
        f"({named([sample.name for sample in cut])}; {worst.name} loses {worst.placement.cropped_fraction:.0%}, at its "
        f"{sides}): heads and edges are cut off; {remedy}"
    ]
