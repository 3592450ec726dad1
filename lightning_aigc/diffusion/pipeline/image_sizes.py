"""Check before the first step that the denoiser can take every image size of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from lightning_aigc.diffusion.families import Components
from lightning_aigc.errors import ModelError


@runtime_checkable
class HasImageSizes(Protocol):
    """A data module that knows its images' sizes before the first batch."""

    def image_sizes(self) -> Sequence[tuple[int, int]]:
        """Return each (width, height) of training and held-out images in pixels."""
        ...

    def size_remedy(self, step: int) -> str:
        """Return what to set so that all sides are multiples of `step`, for an error message."""
        ...


def check_image_sizes(components: Components, data: object) -> None:
    """Raise ModelError for a size of the data, held-out images among them, that the denoiser cannot take."""
    if not isinstance(data, HasImageSizes):
        return
    family = components.family
    sizes = data.image_sizes()
    step, side = family.size_step(components.denoiser, components.vae), family.pixels_per_latent(components.vae)
    odd = [(width, height) for width, height in sizes if width % step or height % step]
    if odd:
        others = f" (and {len(odd) - 1} more sizes)" if len(odd) > 1 else ""
        raise ModelError(
            f"images of {odd[0][0]} x {odd[0][1]} pixels{others} cannot be trained on: both sides must be multiples of"
            f" {step}, as this {family.denoiser_name} reads them; {data.size_remedy(step)}"
        )
    for width, height in sizes:
        family.check_size(components.denoiser, components.vae, height // side, width // side)
