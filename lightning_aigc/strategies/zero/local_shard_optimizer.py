"""Optimizer steps on this rank's local shards of sharded parameters.

torch sends each operation on each DTensor through a dispatcher in Python, and batches none of them by `foreach`. An
elementwise optimizer gives the same numbers on the local shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_aigc.sharding.local_parts import local_part, local_parts, sharded
from lightning_aigc.strategies.finite_step import replaced_step

ELEMENTWISE = (
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
"""Elementwise optimizers. Adafactor and Muon reduce over a full tensor, and a subclass may."""


@contextmanager
def steps_on_local_parts(optimizer: Optimizer) -> Iterator[None]:
    """Within the block, an elementwise `optimizer.step` works on local shards; afterwards its state is DTensors.

    The closure must not use the parameters: they are local shards while it runs.
    """
    groups = optimizer.param_groups
    if type(optimizer) not in ELEMENTWISE or not any(
        isinstance(p, DTensor) for group in groups for p in group["params"]
    ):
        yield
        return
    step = optimizer.step

    def step_on_local_parts(*args: Any, **arguments: Any) -> Any:
        with _on_local_parts(optimizer):
            return step(*args, **arguments)

    with replaced_step(optimizer, step_on_local_parts):
        yield


@contextmanager
def _on_local_parts(optimizer: Optimizer) -> Iterator[None]:
    """Replace parameters, gradients and states by their local shards within the block."""
    sharded_groups = [group["params"] for group in optimizer.param_groups]
    state = optimizer.state
    local_state: defaultdict[Any, Any] = defaultdict(dict)
    optimizer.state = local_state
    pairs: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for group, parameters in zip(optimizer.param_groups, sharded_groups, strict=True):
            group["params"] = local_parts(parameters)
            pairs += zip(parameters, group["params"], strict=True)
        for p, local in pairs:
            if local is not p:
                local.grad = None if p.grad is None else local_part(p.grad)
            if p in state:
                local_state[local] = {key: local_part(value) for key, value in state[p].items()}
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, sharded_groups, strict=True):
            group["params"] = parameters
        optimizer.state = state
        with torch.no_grad():
            for p, local in pairs:
                of_one = state[p] if local in local_state else {}
                for key, value in local_state.get(local, {}).items():
                    of_one[key] = _like(value, p, of_one.get(key))
                if local is not p:
                    local.grad = None


def _like(value: Any, parameter: Tensor, before: Any) -> Any:
    """Return a state's local value as a DTensor if it has the parameter's shape."""
    if isinstance(before, DTensor) and local_part(before) is value:
        return before
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    if value.dim() != parameter.dim() or value.shape != local_part(parameter).shape:
        return value
    return sharded(value, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
