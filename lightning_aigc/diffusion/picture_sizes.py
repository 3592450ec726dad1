"""Before the first step: whether the denoiser can take every image size that the data will give."""

from __future__ import annotations

from typing import Any

from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily
from lightning_aigc.errors import ModelError
from lightning_aigc.protocols import HasPictureSizes


def check_picture_sizes(parts: Components, data: object) -> None:
    """Raise ModelError for a size of the data, held-out images among them, that the denoiser cannot take."""
    if not isinstance(data, HasPictureSizes):
        return
    family: Any = FAMILIES[parts.family]
    sizes = data.picture_sizes()
    step, side = family.size_step(parts.denoiser, parts.vae), family.pixels_per_latent(parts.vae)
    odd = [(width, height) for width, height in sizes if width % step or height % step]
    if odd:
        others = f" (and {len(odd) - 1} more sizes)" if len(odd) > 1 else ""
        raise ModelError(
            f"images of {odd[0][0]} x {odd[0][1]} pixels{others} cannot be trained on: both sides must be multiples of"
            f" {step}, as this {parts.denoiser_name} reads them; {data.size_remedy(step)}"
        )
    for width, height in sizes if isinstance(family, TransformerFamily) else ():
        family.check_size(parts.denoiser, parts.vae, height // side, width // side)
