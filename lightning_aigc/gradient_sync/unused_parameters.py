"""Parameters without a gradient on any rank: their residuals wait, because DDP drops what it is given for them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.gradient_sync.flat_units import FlatUnit, entry_of_each_block
from lightning_aigc.gradient_sync.process_groups import ProcessGroups, own_shard


class UnusedParameters:
    """Takes the residuals of parameters that no rank used in a step out of the sum."""

    def __init__(self, units: Sequence[FlatUnit], groups: ProcessGroups, device: torch.device) -> None:
        self._groups = groups
        self._entry_of_block = {unit.index: self._own_entries(unit).to(device) for unit in units}

    def set_aside(
        self, unit: FlatUnit, gradients: Mapping[str, Tensor], e_N: Tensor, *, on_cpu: bool
    ) -> Generator[Any, None, Tensor | None]:
        """Move the residuals of unused parameters out of e_N.

        Returns: a vector like e_N to add to it afterwards; None where the host knows that nothing is unused, without
            waiting for a device.
        """
        used = torch.stack([gradients[entry.name].count_nonzero() for entry in unit.entries]).to(torch.float32)
        yield self._groups.everyone.all_reduce(used, "index")
        unused = used == 0
        if on_cpu and not unused.any():
            return None
        unused_K1 = unused[self._entry_of_block[unit.index]].view(-1, 1)
        e_KB = e_N.view(-1, unit.alignment)
        aside_KB = torch.where(unused_K1, e_KB, 0.0)
        e_KB.masked_fill_(unused_K1, 0.0)
        return aside_KB.view(-1)

    def _own_entries(self, unit: FlatUnit) -> Tensor:
        """Return the place in `entries` of each block that this rank compresses."""
        start, length = own_shard(unit, self._groups)
        return entry_of_each_block(unit)[start // unit.alignment : (start + length) // unit.alignment]
