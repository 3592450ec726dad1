"""What a rank still owes, by parameter name: how it leaves a run and comes back, on other ranks too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_aigc.gradient_sync.groups import Groups
from lightning_aigc.gradient_sync.layout import Unit
from lightning_aigc.gradient_sync.modes import own_part


def owed_by_name(units: Sequence[Unit], owed: dict[int, Tensor], groups: Groups) -> dict[str, Any]:
    """CPU copies of each parameter's part that this rank keeps: {"start": first value's place, "values": flat}."""
    named = {}
    for unit in units:
        start, vector = own_part(unit, groups)[0], owed[unit.index].cpu()
        for entry in unit.entries:
            low, high = max(entry.start, start), min(entry.stop, start + vector.numel())
            if low < high:
                values = vector[low - start : high - start].clone()
                named[entry.name] = {"start": low - entry.start, "values": values}
    return named


def take_up(
    units: Sequence[Unit], owed: dict[int, Tensor], groups: Groups, saved: Sequence[dict[str, Any]], factor: float
) -> None:
    """Set `owed` to the sum of what was saved, times `factor`; a parameter that is in none of it owes nothing."""
    for unit in units:
        start, vector = own_part(unit, groups)[0], owed[unit.index]
        vector.zero_()
        for entry in unit.entries:
            for of_rank in saved:
                if entry.name not in of_rank:
                    continue
                low, values = entry.start + int(of_rank[entry.name]["start"]), of_rank[entry.name]["values"]
                first, end = max(low, start), min(low + values.numel(), start + vector.numel())
                if first < end:
                    part = values[first - low : end - low].to(vector.device)
                    vector[first - start : end - start].add_(part, alpha=factor)
