"""Copy nested state to host memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_aigc.devices import accelerator_module

StorageKey: TypeAlias = tuple[torch.device, int]
"""Device and address of a storage; two devices may use one address."""


def to_cpu(value: Any, *, clone: bool = False) -> Any:
    """Copy dicts, lists and tuples with their tensors moved to the CPU; other objects are not copied.

    Args: clone: also copy tensors that are on the CPU already.
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


def host_bytes(size: int, *, pinned: bool) -> Tensor:
    """Allocate host memory, page-locked if `pinned` and possible."""
    if pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # limit of locked memory reached; pageable memory is slower but works
            pass
    return torch.empty(size, dtype=torch.uint8)


class HostCopy:
    """Deep copy of a nested state to host memory that preserves shared storages; `size` is known before `take`."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._tensors = _tensors_in(state)
        storages = {_key(t): t.untyped_storage().nbytes() for t in self._tensors if _is_plain(t)}
        self.size = sum(storages.values()) + sum(
            t.numel() * t.element_size() for t in self._tensors if not _is_plain(t)
        )

    def take(self) -> Any:
        """Copy the state. Nothing is allocated on a device."""
        storages: dict[StorageKey, torch.UntypedStorage] = {}
        memo: dict[int, Any] = {id(tensor): _copied(tensor, storages) for tensor in self._tensors}
        for device in {tensor.device for tensor in self._tensors}:
            module: Any = accelerator_module(device)
            if module is not None:
                module.current_stream(device).synchronize()
        return copy.deepcopy(self._state, memo)


def _tensors_in(state: Any) -> list[Tensor]:
    found, seen, left = [], set(), [state]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)
        else:
            continue
        seen.add(id(value))
    return found


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is only a view of a storage, without other state."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _key(tensor: Tensor) -> StorageKey:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _copied(tensor: Tensor, storages: dict[StorageKey, torch.UntypedStorage]) -> Tensor:
    flat = tensor.detach()
    if not _is_plain(tensor):
        return flat.to("cpu", copy=True)
    storage = flat.untyped_storage()
    host = storages.get(_key(flat))
    if host is None:
        is_pinned = accelerator_module(flat.device) is not None
        memory = host_bytes(storage.nbytes(), pinned=is_pinned)
        source = torch.empty(0, dtype=torch.uint8, device=flat.device).set_(storage)
        host = storages[_key(flat)] = memory.copy_(source, non_blocking=True).untyped_storage()
    view = torch.empty(0, dtype=flat.dtype).set_(host, flat.storage_offset(), flat.shape, flat.stride())
    return nn.Parameter(view, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else view
