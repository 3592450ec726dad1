"""Count the bytes that autograd saves for backward, by storage, as they are saved."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

Storages = dict[int, tuple[StorageWeakRef, int]]
"""Storages by address, each with its size in bytes; the weak reference keeps the address from being used again."""


class _Current(threading.local):
    count: SavedBytes | None = None


_current = _Current()


class SavedBytes:
    """While entered, counts what autograd saves, each storage once; parameters and buffers are left out.

    Tensors that a recomputed block holds do not pass autograd's hooks: see `note`.
    """

    def __init__(self, owned: frozenset[int]) -> None:
        self.storages: Storages = {}
        self._owned = owned
        self._hooks = saved_tensors_hooks(self.pack, _unpack)
        self._outer: SavedBytes | None = None

    def __enter__(self) -> SavedBytes:
        self._outer, _current.count = _current.count, self
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()
        _current.count = self._outer

    def pack(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return tensor

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage; a sharded module's gathered weights are parameters, and of other storages."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return
        found = storage_of(tensor)
        if found is not None and found[0] not in self._owned and found[0] not in self.storages:
            self.storages[found[0]] = found[1:]

    def bytes_beside(self, others: Iterable[int]) -> int:
        """Bytes of the storages that are not among these."""
        others = set(others)
        return sum(nbytes for address, (_, nbytes) in self.storages.items() if address not in others)


def note(held: Any) -> None:
    """Count tensors, in any nesting, that backward will need and autograd's hooks do not see."""
    if _current.count is not None:
        for tensor in tensors_in(held):
            _current.count.add(tensor)


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def tensors_in(arguments: Any) -> list[Tensor]:
    """The tensors in nested arguments."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> tuple[int, StorageWeakRef, int] | None:
    """A storage's address, weak reference and bytes; None for a subclass that wraps others, such as a packed weight."""
    if is_traceable_wrapper_subclass(tensor):
        return None
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a kind of tensor that has no storage, as inside torch.func
        return None
    return storage._cdata, StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]


def owned_by(module: nn.Module) -> frozenset[int]:
    """The addresses of the storages of a module's parameters and buffers."""
    found = (storage_of(tensor) for tensor in (*module.parameters(), *module.buffers()))
    return frozenset(storage[0] for storage in found if storage is not None)


def is_in_backward() -> bool:
    """Whether autograd's engine runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint runs a region now, whose tensors are recomputed, or recomputes it in backward."""
    if is_in_backward():
        return True
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"
