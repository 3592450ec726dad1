"""Crops that remove so much of an image that heads and feet go with it."""

from __future__ import annotations

from lightning_aigc.data.advice.dataset_summary import Material, named

MOST_CROPPED = 0.2
"""Share of an image's area: a photograph of 3:2 in the nearest of kohya's buckets loses at most a tenth."""
LEAST_SHARE = 0.1
"""Share of the images that must lose that much."""


def check_crops(material: Material) -> list[str]:
    """Report images that lose more than a fifth of their area to the crop."""
    cut = [sample for sample in material.samples if sample.placement.cropped_fraction > MOST_CROPPED]
    if not cut or len(cut) < LEAST_SHARE * len(material.samples):
        return []
    worst = max(cut, key=lambda sample: sample.placement.cropped_fraction)
    across, down = worst.placement.spare
    sides = "top and bottom" if down > across else "left and right"
    remedy = (
        "crop them yourself, or lower data.init_args.min_bucket_reso and bucket_reso_steps"
        if material.enable_bucket
        else "set data.init_args.enable_bucket: true"
    )
    return [
        f"{len(cut)} of {len(material.samples)} images lose more than {MOST_CROPPED:.0%} to the crop "
        f"({named([sample.name for sample in cut])}; {worst.name} loses {worst.placement.cropped_fraction:.0%}, at its "
        f"{sides}): heads and edges are cut off; {remedy}"
    ]
