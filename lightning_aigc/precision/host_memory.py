"""What backward needs of recomputed blocks waits in host memory, and comes back when it is needed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

OnHost = tuple[torch.device, Tensor]
"""A tensor's device, and its copy in host memory."""


def to_host(tensor: Tensor) -> OnHost:
    """Copy a tensor to host memory, pinned beside an accelerator; a CPU's tensor stays the one it is.

    The host does not wait for the copy, which is in order on the device's current stream: only `from_host` may read it.
    torch's `save_on_cpu(pin_memory=True)` makes every copy contiguous, and a block would compute with other strides.
    """
    if tensor.device.type == "cpu":
        return tensor.device, tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def from_host(packed: OnHost) -> Tensor:
    """The tensor that `to_host` was given, on its device again."""
    device, tensor = packed
    return tensor.to(device, non_blocking=True)


def on_host() -> saved_tensors_hooks:
    """A context in which autograd keeps what it saves in host memory."""
    return saved_tensors_hooks(to_host, from_host)
