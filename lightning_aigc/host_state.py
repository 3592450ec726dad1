"""Nested state with its tensors on the CPU."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor


def to_cpu(value: Any, *, clone: bool = False) -> Any:
    """Copy dicts, lists and tuples with their tensors moved to the CPU; every other object stays as it is.

    Args: clone: copy the tensors that are on the CPU already, so that the result does not change with them.
    """
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            return value.detach().cpu()
        return value.detach().clone() if clone else value
    if isinstance(value, dict):
        moved = copy.copy(value)  # keeps the type, and the `_metadata` that a state_dict carries
        moved.update((key, to_cpu(item, clone=clone)) for key, item in value.items())
        return moved
    if type(value) in (list, tuple):
        return type(value)(to_cpu(item, clone=clone) for item in value)
    return value
