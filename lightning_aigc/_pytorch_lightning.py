"""Register "npu" and "npu_sparse" with `pytorch_lightning`, to raise an error that says what to import instead.

pytorch_lightning duplicates `lightning.pytorch` with separate classes. Each package's Trainer rejects the other's
accelerators and strategies as unknown names.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_aigc.errors import ConfigError

NAMES = ("npu", "npu_sparse")


def register_refusals() -> None:
    """Register `Refusal` under both names; pytorch_lightning must be imported already."""
    from pytorch_lightning.accelerators import AcceleratorRegistry
    from pytorch_lightning.strategies import StrategyRegistry

    registries: tuple[Any, ...] = (AcceleratorRegistry, StrategyRegistry)
    for registry, name in zip(registries, NAMES, strict=True):
        if name not in registry:
            registry.register(name, Refusal, description="needs the Trainer of lightning.pytorch")


class Refusal:
    """The accelerator or strategy that pytorch_lightning creates for these names: raises ConfigError."""

    def __init__(self, **_: Any) -> None:
        refuse()

    @staticmethod
    def is_available() -> bool:
        """False, so that pytorch_lightning does not list it as available."""
        return False


def refuse() -> NoReturn:
    raise ConfigError(
        f"{' and '.join(map(repr, NAMES))} need the Trainer of lightning.pytorch, got pytorch_lightning's; replace the "
        "imports from pytorch_lightning by `from lightning.pytorch import Trainer, LightningModule`"
    )
