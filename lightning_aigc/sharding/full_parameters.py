"""Gather all weights for a while, so that one rank alone may run the model, or write it to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_aigc.sharding.full_state import full_tensor

_gathered: set[int] = set()
"""Ids of the modules whose weights stay gathered now."""


@contextmanager
def full_parameters(root: nn.Module) -> Iterator[None]:
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


@contextmanager
def full_parameters_on_host(root: nn.Module, *, keep: bool) -> Iterator[None]:
    """Put all sharded weights whole in host memory within the block, in their own dtype, and back after it.

    `state_dict()` and all else that reads parameters finds ordinary tensors. `full_parameters` gathers in the dtype of
    the computation and on the device, so what is written from it would be rounded under bf16-mixed.

    Collective at its beginning only; every rank enters. A device holds one weight whole at a time.
    Args: keep: whether this rank reads the weights; else it takes part in gathering, and keeps its shards.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    whole: dict[int, nn.Parameter] = {}
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in whole:
                tensor = full_tensor(parameter, keep=keep)
                whole[id(parameter)] = parameter if tensor is None else nn.Parameter(tensor, parameter.requires_grad)
            replaced.append((module._parameters, name, parameter))
    for parameters, name, parameter in replaced:
        parameters[name] = whole[id(parameter)]
    try:
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


def free_without_backward(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: free what a forward without gradients has gathered, because no backward comes that would."""
    if not torch.is_grad_enabled() and id(module) not in _gathered:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _already_there(part: nn.Module) -> Callable[..., nn.Module]:
    """What `part.to(device)` calls meanwhile: FSDPModule's own would free the weights, and they are on the device."""
    return lambda *_, **__: part


def fsdp_groups(part: FSDPModule) -> list[Any]:
    """Return the module's FSDPParamGroups: one or none before torch 2.13, several since."""
    state: Any = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
