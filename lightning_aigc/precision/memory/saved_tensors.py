"""Bytes that autograd saves for backward, counted once per storage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

Storages = dict[int, tuple[StorageWeakRef, int]]
"""Storages by address, each with its size in bytes; the weak reference keeps the address from being reused."""


class SavedBytes:
    """Storages that autograd saved, without those at the addresses `owned`; see `context.count_saved`."""

    def __init__(self, owned: frozenset[int]) -> None:
        self.storages: Storages = {}
        self._owned = owned

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor, as a pack hook of autograd."""
        self.add(tensor)
        return tensor.detach()  # an operator that saves its own result would keep itself and all before it alive

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless a parameter lies in it.

        A sharded module's gathered weights are parameters in storages that the module does not own.
        """
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return
        storage = storage_of(tensor)
        if storage is not None and storage[0] not in self._owned and storage[0] not in self.storages:
            self.storages[storage[0]] = storage[1:]

    def total(self, without: Iterable[int] = ()) -> int:
        """Return the bytes of all storages except those at the addresses `without`."""
        excluded = set(without)
        return sum(nbytes for address, (_, nbytes) in self.storages.items() if address not in excluded)


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return the tensors in nested arguments."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def storages_in(arguments: Any) -> Storages:
    """Return the storages of the tensors in nested arguments."""
    storages = (storage_of(tensor) for tensor in tensors_in(arguments))
    return {storage[0]: storage[1:] for storage in storages if storage is not None}


def storage_of(tensor: Tensor) -> tuple[int, StorageWeakRef, int] | None:
    """Return a storage's address, weak reference and bytes; None for a wrapper subclass such as a packed weight."""
    if is_traceable_wrapper_subclass(tensor):
        return None
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a kind of tensor that has no storage, as inside torch.func
        return None
    return storage._cdata, StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]


def owned_by(module: nn.Module) -> frozenset[int]:
    """Return the addresses of the storages of a module's parameters and buffers."""
    storages = (storage_of(tensor) for tensor in (*module.parameters(), *module.buffers()))
    return frozenset(storage[0] for storage in storages if storage is not None)


def is_in_backward() -> bool:
    """Whether autograd's engine runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_checkpointed() -> bool:
    """Whether a region of torch.utils.checkpoint runs now, for the first time or again in backward."""
    if is_in_backward():
        return True
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"
