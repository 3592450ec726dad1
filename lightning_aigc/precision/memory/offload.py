"""Keep saved tensors in host memory until backward reads them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

OnHost = tuple[torch.device, Tensor]
"""A tensor's device, and its copy in host memory."""


def to_host(tensor: Tensor) -> OnHost:
    """Copy a tensor to host memory, pinned if it comes from an accelerator; a CPU tensor is not copied.

    The copy runs on the device's current stream and the host does not wait for it: only `from_host` may read it.
    torch's `save_on_cpu(pin_memory=True)` makes every copy contiguous, and a block would compute with other strides.
    """
    if tensor.device.type == "cpu":
        return tensor.device, tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def from_host(stored: OnHost) -> Tensor:
    """Copy the tensor that `to_host` stored back to its device."""
    device, tensor = stored
    return tensor.to(device, non_blocking=True)


def save_on_host() -> saved_tensors_hooks:
    """Make autograd keep the tensors that it saves in host memory in this scope."""
    return saved_tensors_hooks(to_host, from_host)
