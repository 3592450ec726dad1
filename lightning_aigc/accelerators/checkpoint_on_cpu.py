"""Checkpoints of CPU tensors, whatever the device they were trained on: readable where there is no NPU.

Lightning writes tensors as they are; a file with tensors of an NPU does not load without torch_npu, unless every
reader thinks of `map_location`.
"""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch.plugins import CheckpointIO
from torch import Tensor


def on_cpu(value: Any) -> Any:
    """The same dicts, lists and tuples with CPU tensors in them; tensors on the CPU, and other objects, as they are."""
    if isinstance(value, Tensor):
        return value if value.device.type == "cpu" else value.detach().cpu()
    if isinstance(value, dict):
        moved = copy.copy(value)  # keeps the type, and the `_metadata` that a state_dict carries
        moved.update((key, on_cpu(item)) for key, item in value.items())
        return moved
    if type(value) in (list, tuple):
        return type(value)(map(on_cpu, value))
    return value


class CheckpointOnCPU(CheckpointIO):
    """Another CheckpointIO, given CPU tensors only."""

    def __init__(self, wrapped: CheckpointIO) -> None:
        self.wrapped = wrapped

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.wrapped.save_checkpoint(on_cpu(checkpoint), path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.wrapped.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.wrapped.remove_checkpoint(path)

    def teardown(self) -> None:
        self.wrapped.teardown()
