"""Our names in `pytorch_lightning`, where they say what to import instead.

It is a twin of `lightning.pytorch` with classes of its own, installed beside it; a Trainer of one refuses the other's
accelerators and strategies as names that it never heard of.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_aigc.errors import ConfigError

NAMES = ("npu", "npu_sparse")


def refuse_our_names() -> None:
    """Register them with pytorch_lightning, which is imported."""
    from pytorch_lightning.accelerators import AcceleratorRegistry
    from pytorch_lightning.strategies import StrategyRegistry

    registries: tuple[Any, ...] = (AcceleratorRegistry, StrategyRegistry)
    for registry, name in zip(registries, NAMES, strict=True):
        if name not in registry:
            registry.register(name, Refusal, description="wants the Trainer of lightning.pytorch")


class Refusal:
    """What pytorch_lightning makes when it is asked for one of our names."""

    def __init__(self, **_: Any) -> None:
        refuse()

    @staticmethod
    def is_available() -> bool:
        """Asked when pytorch_lightning lists what a user could have instead."""
        return False


def refuse() -> NoReturn:
    raise ConfigError(
        f"{' and '.join(map(repr, NAMES))} serve the Trainer of lightning.pytorch, got one of pytorch_lightning; write "
        "`from lightning.pytorch import Trainer, LightningModule` in place of the imports from pytorch_lightning"
    )
