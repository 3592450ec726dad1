"""Families of diffusion transformers, a file each: what one differs in from the others."""

from lightning_aigc.diffusion.families.family import Family
from lightning_aigc.diffusion.families.sd3 import StableDiffusion3

FAMILIES: dict[str, Family] = {family.name: family for family in (StableDiffusion3(),)}
"""Families by the name that `Components.family` has."""

__all__ = ["FAMILIES", "Family"]
