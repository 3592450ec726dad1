"""Bytes of weights that a sharded model holds whole, and of what is being gathered, as its modules run."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_aigc.sharding.full_parameters import fsdp_groups


def gathered_bytes(root: nn.Module) -> int:
    """Bytes of weights that are whole now, or arrived and not yet handed out."""
    total = 0
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                whole = [getattr(of, "_unsharded_param", None) for of in group.fsdp_params]
                found = sum(0 if of is None else of.untyped_storage().nbytes() for of in whole)
                arrived = group._all_gather_result
                if not found and arrived is not None:
                    found = arrived.all_gather_output.untyped_storage().nbytes()
                total += found
    return total


def watch_gathered(root: nn.Module) -> list[int]:
    """The bytes of whole weights each time that a group's are handed out and the next group's are asked for."""
    seen: list[int] = []

    def watched(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            seen.append(gathered_bytes(root))
            return result

        return call

    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                for name in ("wait_for_unshard", "pre_backward"):
                    setattr(group, name, watched(getattr(group, name)))
    return seen
