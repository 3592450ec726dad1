"""Exact snapshots of a training: written beside it, whole or not at all, and read without running any code."""

from lightning_aigc.checkpoint.catalog import Snapshot, find_snapshots, newest_complete
from lightning_aigc.checkpoint.checkpoint_io import SnapshotCheckpointIO
from lightning_aigc.checkpoint.store import SnapshotStore
from lightning_aigc.checkpoint.tree import pack, unpack
from lightning_aigc.renamed import renamed

__all__ = [
    "Snapshot",
    "SnapshotCheckpointIO",
    "SnapshotStore",
    "find_snapshots",
    "newest_complete",
    "pack",
    "unpack",
]

__getattr__ = renamed(__name__, {"AccumulationWindow": "lightning_aigc.accumulation.AccumulationWindow"})
