"""Memory of a training step without its saved activations, and memory that a device has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_aigc.devices import accelerator_module
from lightning_aigc.precision.memory.saved_tensors import storage_of
from lightning_aigc_kernels.packed_weight import packed_bytes

FIT_SHARE = 0.92
"""Share of a device's memory that `fit` plans for; the rest is left for fragments and the libraries' workspaces."""
ADAM_STATES = 2
"""Tensors of a parameter's size in the state of Adam and AdamW, assumed until the optimizer has a state."""


def bytes_without_activations(
    model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device, saved_now: int
) -> int:
    """Return the bytes of a step that no plan changes: weights, gradients, optimizer states and all else on the device.

    Args: saved_now: Bytes that autograd has saved when this is called.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    states = [
        leaf for optimizer in optimizers for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor)
    ]
    gradients = [p.grad for p in trained if p.grad is not None]
    missing = sum(p.nbytes for p in trained if p.grad is None)
    if not states:
        missing += ADAM_STATES * sum(p.nbytes for p in trained)
    backend = accelerator_module(device)
    if backend is not None:
        present = int(backend.memory_allocated(device)) - saved_now  # type: ignore[attr-defined]
    else:
        present = _bytes_of((*model.parameters(), *model.buffers(), *gradients, *states))
    return present + missing


def int8_savings(model: nn.Module) -> int:
    """Return the bytes that int8 would save on frozen weights of linear layers and convolutions in full precision."""
    weights = {
        id(weight): weight
        for module in model.modules()
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
        and not (weight := module.weight).requires_grad
        and storage_of(weight) is not None
    }
    return sum(max(0, weight.nbytes - packed_bytes(weight.numel(), "int8")) for weight in weights.values())


def available_bytes(device: torch.device, model: nn.Module) -> int:
    """Return the bytes that this process can use in total: free memory and memory that it already holds."""
    backend = accelerator_module(device)
    if backend is not None:
        free, _ = backend.mem_get_info(device)  # type: ignore[attr-defined]
        return int(FIT_SHARE * (free + backend.memory_reserved(device)))  # type: ignore[attr-defined]
    return int(FIT_SHARE * (_free_on_host() + _bytes_of((*model.parameters(), *model.buffers()))))


def _free_on_host() -> int:
    return int(psutil.virtual_memory().available)  # with the page cache


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    tensors = list(tensors)
    plain = {storage[0]: storage[2] for storage in map(storage_of, tensors) if storage is not None}
    return sum(plain.values()) + sum(_packed_bytes(tensor) for tensor in tensors if storage_of(tensor) is None)


def _packed_bytes(wrapper: Any) -> int:
    """Return the bytes of the tensors that a subclass wraps."""
    names, _ = wrapper.__tensor_flatten__()
    return sum(int(getattr(wrapper, name).nbytes) for name in names)
