"""Model families, one file per family; each file is found by its place in this folder."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

from lightning_aigc.diffusion.families.family import CardRow, Components, Control, Family, StepMemory, TextSource
from lightning_aigc.diffusion.families.transformer_control import TransformerControl
from lightning_aigc.diffusion.families.transformer_family import TransformerFamily


def _families() -> Iterator[Family]:
    for found in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{found.name}")
        for kind in vars(module).values():
            is_own = inspect.isclass(kind) and issubclass(kind, Family) and kind.__module__ == module.__name__
            if is_own and hasattr(kind, "name"):
                yield kind()


FAMILIES: dict[str, Family] = {family.name: family for family in _families()}
"""All families by name."""
TRANSFORMERS: dict[str, TransformerFamily] = {
    name: family for name, family in FAMILIES.items() if isinstance(family, TransformerFamily)
}
CONTROLLED: dict[str, TransformerFamily] = {name: f for name, f in TRANSFORMERS.items() if f.control is not None}
"""Transformers that diffusers has a ControlNet for."""
U_NETS: dict[str, Family] = {name: family for name, family in FAMILIES.items() if name not in TRANSFORMERS}

__all__ = [
    "CONTROLLED",
    "FAMILIES",
    "TRANSFORMERS",
    "U_NETS",
    "CardRow",
    "Components",
    "Control",
    "Family",
    "StepMemory",
    "TextSource",
    "TransformerControl",
    "TransformerFamily",
]
