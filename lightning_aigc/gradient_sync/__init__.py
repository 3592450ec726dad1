"""Gradient sync that sends a fraction of the bytes, for any torch DistributedDataParallel. README.md has the map."""

from lightning_aigc.gradient_sync.compressor import GradientCompressor
from lightning_aigc.gradient_sync.options import SyncOptions
from lightning_aigc.gradient_sync.transport.process_groups import SyncError

__all__ = ["GradientCompressor", "SyncError", "SyncOptions"]
