"""Gather all weights for a while, so that one rank alone may run the model, or read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_aigc.sharding.fsdp_groups import fsdp_groups

_gathered: set[int] = set()
"""Ids of the modules whose weights stay gathered now."""


@contextmanager
def whole_weights(root: nn.Module) -> Iterator[None]:
    """Keep all weights of a sharded model whole within the block. Collective at its beginning only; every rank enters.

    Nothing may be trained within. Costs the memory of the weights once more on each rank.
    """
    parts: list[Any] = [part for part in root.modules() if isinstance(part, FSDPModule)]
    frees = [any(group.post_forward_mesh_info for group in fsdp_groups(part)) for part in parts]
    _gathered.update(map(id, parts))
    try:
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
            vars(part)["_apply"] = _already_there(part)
        yield
    finally:
        _gathered.difference_update(map(id, parts))
        for part, does_free in zip(parts, frees, strict=True):
            vars(part).pop("_apply", None)
            part.set_reshard_after_forward(does_free, recurse=False)
            part.reshard()


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """A module's state_dict within `whole_weights`, where its own `state_dict()` would cut the weights again."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return {name: tensor.detach() for name, tensor in found.items()}


def free_without_backward(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: free what a forward without gradients has gathered, because no backward comes that would."""
    if not torch.is_grad_enabled() and id(module) not in _gathered:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _already_there(part: nn.Module) -> Callable[..., nn.Module]:
    """What `part.to(device)` calls meanwhile: FSDPModule's own would free the weights, and they are on the device."""
    return lambda *_, **__: part
