"""Register "npu" and "npu_sparse" with the second of two Lightning packages, to raise an error with the remedy.

`lightning.pytorch` and `pytorch_lightning` have separate classes, and each Trainer rejects the other's. Our classes are
made from those of the package that was imported first.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

from lightning_aigc import _lightning
from lightning_aigc.errors import ConfigError

NAMES = ("npu", "npu_sparse")


def register_refusals(package: str) -> None:
    """Register `Refusal` under both names with this package, which must be imported already."""
    registries: tuple[Any, ...] = (
        importlib.import_module(f"{package}.accelerators").AcceleratorRegistry,
        importlib.import_module(f"{package}.strategies").StrategyRegistry,
    )
    for registry, name in zip(registries, NAMES, strict=True):
        if name not in registry:
            registry.register(name, Refusal, description=f"needs the Trainer of {_lightning.package()}")


class Refusal:
    """The accelerator or strategy that the second package creates for these names: raises ConfigError."""

    def __init__(self, **_: Any) -> None:
        refuse()

    @staticmethod
    def is_available() -> bool:
        """False, so that the second package does not list it as available."""
        return False


def refuse() -> NoReturn:
    first = _lightning.package()
    (second,) = {_lightning.LIGHTNING, _lightning.PYTORCH_LIGHTNING} - {first}
    raise ConfigError(
        f"{' and '.join(map(repr, NAMES))} need the Trainer of {first}, which was imported first, got {second}'s; "
        f"replace the imports from {second} by `from {first} import Trainer, LightningModule`, "
        f"or import {second} before lightning_aigc and leave {first} out"
    )
