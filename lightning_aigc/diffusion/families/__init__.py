"""Families of pipelines, a file each: what one differs in from the others."""

from lightning_aigc.diffusion.families.controlled_family import ControlledFamily
from lightning_aigc.diffusion.families.family import Family
from lightning_aigc.diffusion.families.flux import Flux
from lightning_aigc.diffusion.families.flux2 import Flux2Klein
from lightning_aigc.diffusion.families.qwen_image import QwenImage
from lightning_aigc.diffusion.families.sd import StableDiffusion, StableDiffusionXL
from lightning_aigc.diffusion.families.sd3 import StableDiffusion3
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily
from lightning_aigc.diffusion.families.z_image import ZImage

U_NETS: dict[str, Family] = {family.name: family for family in (StableDiffusion(), StableDiffusionXL())}
TRANSFORMERS: dict[str, TransformerFamily] = {
    family.name: family for family in (StableDiffusion3(), Flux(), Flux2Klein(), ZImage(), QwenImage())
}
CONTROLLED: dict[str, ControlledFamily] = {
    name: family for name, family in TRANSFORMERS.items() if isinstance(family, ControlledFamily)
}
"""Those of `TRANSFORMERS` that diffusers has a ControlNet for, which trains here."""
FAMILIES: dict[str, Family] = {**U_NETS, **TRANSFORMERS}
"""Families by the name that `Components.family` has."""

__all__ = ["CONTROLLED", "FAMILIES", "TRANSFORMERS", "U_NETS", "ControlledFamily", "Family", "TransformerFamily"]
