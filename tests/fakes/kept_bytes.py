"""Count the bytes that autograd keeps, by the storages that are alive, whoever holds them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fakes.npu.fake_npu import NpuTensor


class LiveStorages(TorchDispatchMode):
    """Remembers every storage that an operator made, without keeping it alive, and the most bytes alive at once."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.owned = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.owned:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        return sum(nbytes for reference, nbytes in self.made.values() if not reference.expired())


def kept_bytes(module: nn.Module, call: Callable[[nn.Module], object]) -> int:
    """Bytes alive after a forward pass, its output included: what backward will need."""
    gc.collect()
    with LiveStorages(module) as storages:
        output = call(module)
        gc.collect()
        kept = storages.alive()
    del output
    return kept


def step_peak_bytes(module: nn.Module, step: Callable[[nn.Module], object]) -> int:
    """The most bytes that operators' results hold at once in a step, when an operator returns."""
    gc.collect()
    with LiveStorages(module) as storages, torch.autograd.set_multithreading_enabled(False):
        step(module)
        return storages.peak


def npu_storages() -> dict[int, int]:
    """Bytes of each storage on the fake npu that anybody holds, by address."""
    return storages_of([tensor.inside for tensor in live_tensors() if type(tensor) is NpuTensor])


def host_storages() -> dict[int, int]:
    """Bytes of each storage in host memory that anybody holds, beside what the fake npu computes with."""
    on_npu = npu_storages()
    found = storages_of([tensor for tensor in live_tensors() if type(tensor) is Tensor and tensor.device.type == "cpu"])
    return {address: nbytes for address, nbytes in found.items() if address not in on_npu}


def live_tensors() -> list[Any]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) in (Tensor, NpuTensor)]


def storages_of(tensors: list[Tensor]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}
