"""Exact snapshots of a training: written during the training, atomically, and read without running any code."""

from lightning_aigc.checkpoint.async_checkpoint_io import SnapshotCheckpointIO
from lightning_aigc.checkpoint.files.reader import Snapshot, find_snapshots, newest_complete
from lightning_aigc.checkpoint.files.serialization import pack, unpack
from lightning_aigc.checkpoint.files.writer import SnapshotWriter

__all__ = [
    "Snapshot",
    "SnapshotCheckpointIO",
    "SnapshotWriter",
    "find_snapshots",
    "newest_complete",
    "pack",
    "unpack",
]
