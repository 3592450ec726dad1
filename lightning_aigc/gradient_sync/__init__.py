"""Gradient sync that sends a fraction of the bytes, for any torch DistributedDataParallel.

Torch is imported with the first name that is asked for: `lightning doctor` reads topologies where it cannot be.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_aigc.gradient_sync.compressor import GradientCompressor
    from lightning_aigc.gradient_sync.options import SyncOptions
    from lightning_aigc.gradient_sync.runners import SyncError

__all__ = ["GradientCompressor", "SyncError", "SyncOptions"]

_MODULES = {"GradientCompressor": "compressor", "SyncOptions": "options", "SyncError": "runners"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
