"""Edit: the images that sampling starts from, and the arguments of diffusers' pipeline for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lightning_aigc.data.images.edit_pairs import size_problem
from lightning_aigc.data.images.image_file import load_picture
from lightning_aigc.devices import float32_region
from lightning_aigc.diffusion.families import Components, Family
from lightning_aigc.errors import ConfigError, ModelError


@dataclass(frozen=True)
class Edit:
    """Sources and sizes of the images to draw."""

    sources: Sequence[Sequence[Image.Image]]
    """For each image its sources, RGB, cut as they are read."""
    sizes: Sequence[tuple[int, int]]
    """(width, height) of each image."""

    def kinds(self) -> dict[tuple[tuple[int, int], ...], list[int]]:
        """Positions of the images by their size and their sources' sizes."""
        found: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for position, (size, images) in enumerate(zip(self.sizes, self.sources, strict=True)):
            found.setdefault((size, *(image.size for image in images)), []).append(position)
        return found


def check_edit(family: Family, edit: Edit | None) -> None:
    """Raise ModelError where the family needs other sources than there are."""
    if edit is None:
        if family.needs_sources:
            raise ModelError(
                f"{family.title} edits images: give the images to start from, `sources` of `sample` or --source of"
                " `lightning sample`"
            )
        return
    small = min((image.size for images in edit.sources for image in images), key=min)
    if min(small) < family.smallest_source:
        raise ModelError(
            f"got a source of {small[0]} x {small[1]} pixels, and {family.title}'s pipeline takes sides of"
            f" {family.smallest_source} and more; give a larger one, or a larger resolution"
        )
    most = max(map(len, edit.sources))
    if most > family.max_sources:
        takes = f"takes {family.max_sources} at most" if family.max_sources else "draws from text alone"
        remedy = "leave out the others" if family.max_sources else "leave them out, or take a model that edits"
        raise ModelError(f"got {most} source images for one image, and {family.title} {takes}; {remedy}")


def edit_arguments(
    pipeline: Any, components: Components, edit: Edit, rows: Sequence[int], device: torch.device
) -> dict[str, Any]:
    """The pipeline's arguments for the sources of these images, which have equal sizes."""
    family, vae = components.family, components.vae
    images = [edit.sources[row] for row in rows]
    latents = []
    with torch.no_grad(), float32_region(device):
        for number in range(len(images[0])):
            shown = np.stack([np.asarray(each[number].convert("RGB")) for each in images])
            pixels = torch.from_numpy(shown).permute(0, 3, 1, 2).float() / 127.5 - 1
            mean = family.encode(vae, pixels.to(device, vae.dtype)).float().chunk(2, dim=1)[0]
            latents.append(family.scale(vae, mean))
    width, height = edit.sizes[rows[0]]
    given = family.source_arguments(pipeline, components, images, latents, (width, height))
    return {"height": height, "width": width} | given


def read_sources(paths: Sequence[str | Path], step: int, side: int | None, argument: str) -> list[Image.Image]:
    """Images to edit, cut to multiples of `step` pixels, and scaled down to the area of `side` squared.

    Raises: ConfigError naming `argument` for a file that is missing, broken, too small or too long.
    """
    return [cut_source(open_source(Path(path), argument), step, side) for path in paths]


def open_source(path: Path, argument: str) -> Image.Image:
    """An image to edit. Raises: ConfigError naming `argument` for one that is missing, broken or of a bad size."""
    try:
        image, _ = load_picture(path)
    except Exception as error:  # a decoder may raise anything on bytes that it did not expect
        reason = "there is no such file" if not path.is_file() else "it is not an image that can be read"
        raise ConfigError(f"{argument}: {path} cannot be edited, {reason}; give another image") from error
    if said := size_problem(*image.size):
        raise ConfigError(f"{argument}: {path} is {said}; give another image")
    return image


def cut_source(image: Image.Image, step: int, side: int | None) -> Image.Image:
    """The image at most `side` squared large, with sides that are multiples of `step`, cut at the middle."""
    width, height = image.size
    scale = 1.0 if side is None else min(1.0, side / math.sqrt(width * height))
    size = [max(step, round(each * scale) // step * step) for each in (width, height)]
    whole = max(size[0] / width, size[1] / height)
    across, down = (width - size[0] / whole) / 2, (height - size[1] / whole) / 2
    box = (across, down, width - across, height - down)
    return image.resize((size[0], size[1]), Image.Resampling.LANCZOS, box=box)
