"""Measure the memory that a U-Net's forward pass saves for backward, and a device's peak."""
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Record weak references to every storage that an operator allocates."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.owned = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.owned:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_mib(self) -> float:
        gc.collect()
        return sum(nbytes for reference, nbytes in self.made.values() if not reference.expired()) / 2**20


def kept_mib(unet: nn.Module, given: dict[str, Any]) -> float:
    gc.collect()
    with LiveStorages(unet) as storages:
        output = unet(**given).sample
        kept = storages.live_mib()
    del output
    return kept


def kept_by_compiled_mib(unet: nn.Module, given: dict[str, Any]) -> float:
    """MiB that compiled code saves for backward, without weights; a dispatch mode cannot see inside it."""
    owned = {t.untyped_storage()._cdata for t in (*unet.parameters(), *unet.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = unet(**given).sample
    del output
    return sum(saved.values()) / 2**20


def peak_mib(device: str, step: Callable[[], object]) -> float | None:
    """Peak of the device allocator over a step, MiB; None on a CPU."""
    if device == "cpu":
        return None
    module = getattr(torch, device)
    module.reset_peak_memory_stats()
    step()
    return float(module.max_memory_allocated()) / 2**20
