"""Model families, one file per family; each file is found by its place in this folder."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

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
SHORT: dict[str, Family] = {family.short_name or family.name: family for family in FAMILIES.values()}
"""Families by the short names of their default bases."""
TRANSFORMERS: dict[str, TransformerFamily] = {
    name: family for name, family in FAMILIES.items() if isinstance(family, TransformerFamily)
}
CONTROLLED: dict[str, TransformerFamily] = {name: f for name, f in TRANSFORMERS.items() if f.control is not None}
"""Transformers that diffusers has a ControlNet for."""
U_NETS: dict[str, Family] = {name: family for name, family in FAMILIES.items() if name not in TRANSFORMERS}


def full_name(name_or_path: str) -> str:
    """The hub id of a short name such as sd15; other names, and a folder of that name, as they are."""
    if name_or_path in SHORT and not Path(name_or_path).exists():
        return SHORT[name_or_path].base
    return name_or_path


__all__ = [
    "CONTROLLED",
    "FAMILIES",
    "SHORT",
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
    "full_name",
]
