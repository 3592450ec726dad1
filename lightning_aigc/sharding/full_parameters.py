"""Gather all weights temporarily, so that one rank alone can run the model or write it to a file."""

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
"""Ids of the modules whose weights stay gathered."""


@contextmanager
def full_parameters(root: nn.Module) -> Iterator[None]:
    """Keep all weights of a sharded model gathered within the block. Collective only at its beginning, on every rank.

    Enter it between a backward and the next forward: no training is possible within. Costs the memory of all weights on
    each rank.
    """
    parts: list[Any] = [part for part in root.modules() if isinstance(part, FSDPModule)]
    frees = [any(group.post_forward_mesh_info for group in fsdp_groups(part)) for part in parts]
    _gathered.update(map(id, parts))
    try:
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
            vars(part)["_apply"] = _without_move(part)
        yield
    finally:
        _gathered.difference_update(map(id, parts))
        for part, does_free in zip(parts, frees, strict=True):
            vars(part).pop("_apply", None)
            part.set_reshard_after_forward(does_free, recurse=False)
            part.reshard()
            _forget_forwards(part)


def _forget_forwards(part: FSDPModule) -> None:
    """Clear FSDP2's private record of forwards, by which the next backward would gather a block that a rank ran alone.

    That collective has no partner on the other ranks, so that they all hang. On a CPU backward gathers nothing early.
    """
    for group in fsdp_groups(part):
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


@contextmanager
def full_parameters_on_host(root: nn.Module, *, keep: bool) -> Iterator[None]:
    """Replace all sharded weights within the block by full ones in host memory, in their own dtype.

    `state_dict()` and other readers of parameters get ordinary tensors. `full_parameters` gathers on the device in the
    dtype of the computation, so a file written from it would be rounded under bf16-mixed.

    Collective only at its beginning, on every rank. A device holds one full weight at a time.
    Args: keep: whether this rank reads the weights; else it takes part in gathering, and keeps its shards.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    full: dict[int, nn.Parameter] = {}
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in full:
                tensor = full_tensor(parameter, keep=keep)
                full[id(parameter)] = parameter if tensor is None else nn.Parameter(tensor, parameter.requires_grad)
            replaced.append((module._parameters, name, parameter))
    for parameters, name, parameter in replaced:
        parameters[name] = full[id(parameter)]
    try:
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


def free_without_backward(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: free weights gathered by a forward without gradients, which no backward would free."""
    if not torch.is_grad_enabled() and id(module) not in _gathered:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _without_move(part: nn.Module) -> Callable[..., nn.Module]:
    """Return an `_apply` for `part.to(device)` that does nothing: FSDPModule's would free the weights."""
    return lambda *_, **__: part


def fsdp_groups(part: FSDPModule) -> list[Any]:
    """Return FSDP2's private parameter groups of a module: one or none before torch 2.13, several since."""
    state: Any = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
