"""CheckpointOnCPU: save checkpoints with CPU tensors, so that they load on machines without an NPU.

Lightning saves tensors on their device; a file with NPU tensors does not load without torch_npu unless every reader
passes `map_location`.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins import CheckpointIO

from lightning_aigc.host_state import to_cpu


class CheckpointOnCPU(CheckpointIO):
    """Wraps another CheckpointIO and passes it CPU tensors only."""

    def __init__(self, wrapped: CheckpointIO) -> None:
        self.wrapped = wrapped

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.wrapped.save_checkpoint(to_cpu(checkpoint), path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.wrapped.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.wrapped.remove_checkpoint(path)

    def teardown(self) -> None:
        self.wrapped.teardown()
