"""The parameter groups that torch's FSDP2 keeps of a sharded module, which no public name reaches."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule


def fsdp_groups(part: FSDPModule) -> list[Any]:
    """Return the module's FSDPParamGroups: one or none before torch 2.13, several since."""
    state: Any = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
