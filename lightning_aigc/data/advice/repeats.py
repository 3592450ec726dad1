"""Too few images for the number of steps."""

from __future__ import annotations

from lightning_aigc.data.advice.dataset_summary import Material

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
