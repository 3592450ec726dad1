"""UnitReducer: one unit, from the gradients of this rank to their mean over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.gradient_sync.hook import UnitGradients
from lightning_aigc.gradient_sync.modes.direct_quantized import DirectUnit
from lightning_aigc.gradient_sync.modes.reductions import Quantized, Reduction
from lightning_aigc.gradient_sync.residual import Residuals
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups
from lightning_aigc.gradient_sync.units import FlatUnit, Kind, entry_of_each_block, own_shard, view_of


class UnitReducer:
    """Flattens a unit's gradients, adds its residual, reduces it over the ranks, and writes the sum back.

    In a hierarchical sync the reduction inside a node is dense, and each rank compresses its shard of the node's sum.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        reductions: Mapping[Kind, Reduction],
        residuals: Residuals,
        unused: UnusedParameters | None,
        device: torch.device,
        loss_scale: Callable[[], float],
    ) -> None:
        self._groups, self._reductions, self._residuals, self._unused = groups, reductions, residuals, unused
        self._device, self._loss_scale = device, loss_scale
        self.on_cpu = device.type == "cpu"
        """Whether the host can read values without waiting for a device."""
        self._is_compressing = False
        self._scale: float | None = None
        self._checks: list[Tensor] = []
        self._direct: dict[int, DirectUnit] = {}

    def begin_step(self, *, compressing: bool) -> None:
        self._is_compressing, self._scale, self._checks = compressing, None, []

    def is_finite(self) -> bool:
        """Whether all sums of the step are finite; the same on every rank. Waits for the device."""
        return bool(torch.isfinite(torch.stack(self._checks)).all())

    def reduce(self, collected: UnitGradients) -> Generator[Any, None, None]:
        """Replace the unit's gradients by their mean over the ranks."""
        direct = self._direct_of(collected)
        if direct is not None:
            share = self._share()
            residual, error = self._residuals.of(collected.unit), self._residuals.next_of(collected.unit)
            assert self._scale is not None
            check = yield from direct.reduce(collected.by_name, share, residual, error, self._scale)
            self._checks.append(check)
            return
        total = yield from self.add_up(collected, self.flatten(collected))
        self.write_back(collected, total)

    def flatten(self, collected: UnitGradients) -> Tensor:
        """Return this rank's share of the unit's mean gradient as one vector; in a flat sync with the residual."""
        share = self._share()
        unit, gradients = collected.unit, collected.by_name
        has_own_buffer = self._needs_own_buffer(unit)
        flat = torch.zeros(unit.numel, device=self._device) if has_own_buffer else self._residuals.next_of(unit)
        if has_own_buffer or not self._residuals.error_feedback:
            torch._foreach_copy_([view_of(flat, e) for e in unit.entries], [gradients[e.name] for e in unit.entries])
            return flat.mul_(share)
        residual = self._residuals.of(unit)
        if self.on_cpu:  # one pass instead of two
            for entry in unit.entries:
                torch.add(view_of(residual, entry), gradients[entry.name], alpha=share, out=view_of(flat, entry))
        else:
            flat.copy_(residual)
            torch._foreach_add_(
                [view_of(flat, e) for e in unit.entries], [gradients[e.name] for e in unit.entries], alpha=share
            )
        return flat

    def add_up(self, collected: UnitGradients, flat: Tensor) -> Generator[Any, None, Tensor]:
        """Return the sum over the ranks of the vectors of `flatten`."""
        unit, inside = collected.unit, self._groups.inside
        compresses = not unit.uncompressed and self._is_compressing
        reduction = self._reductions[unit.kind if compresses else "protected"]
        e_N = flat
        if inside is not None:
            e_N = flat.new_empty(unit.numel // inside.size) if unit.uncompressed else self._residuals.next_of(unit)
            yield inside.reduce_scatter(e_N, flat)
            if self._residuals.error_feedback and not unit.uncompressed:
                e_N.add_(self._residuals.of(unit))
        aside_N = None
        if self._unused is not None and not unit.uncompressed:
            aside_N = yield from self._unused.set_aside(unit, collected.by_name, e_N, on_cpu=self.on_cpu)
        total, check = yield from reduction.reduce(unit, e_N, self._groups.between)
        if aside_N is not None:
            e_N.add_(aside_N)
        if not compresses:
            self._reductions[unit.kind].observe(unit, total)
        total[0] += 0 * check  # what is not finite may not have been sent: a loss scaler must find it nevertheless
        if inside is not None:
            yield inside.all_gather(flat, total)
            total, check = flat, flat.view(inside.size, -1)[:, 0].sum()  # the ranks of a node must decide alike
        self._checks.append(check)
        return total

    def write_back(self, collected: UnitGradients, total: Tensor) -> None:
        """Write a sum into the gradients of the unit, under the loss scale of this step."""
        assert self._scale is not None
        if self._scale != 1.0:
            total.mul_(self._scale)
        entries = collected.unit.entries
        torch._foreach_copy_([collected.by_name[e.name] for e in entries], [view_of(total, e) for e in entries])

    def _share(self) -> float:
        """Return the factor that makes a gradient this rank's share of the mean, without the loss scale."""
        if self._scale is None:
            self._scale = self._loss_scale()
        return 1 / (self._groups.world_size * self._scale)

    def _direct_of(self, collected: UnitGradients) -> DirectUnit | None:
        """Return the reducer of this unit without a flat vector, None if the unit needs one."""
        unit, reduction = collected.unit, self._reductions["values"]
        if not (
            self.on_cpu and self._is_compressing and unit.kind == "values" and isinstance(reduction, Quantized)
            and self._residuals.error_feedback and self._unused is None and self._groups.inside is None
        ):  # fmt: skip
            return None
        if unit.index not in self._direct:
            self._direct[unit.index] = DirectUnit(unit, reduction.quantizer, self._groups.between)
        direct = self._direct[unit.index]
        return direct if direct.takes(collected.by_name) else None

    def _needs_own_buffer(self, unit: FlatUnit) -> bool:
        """Whether the unit needs its own buffer instead of the residual's next one."""
        return unit.uncompressed or self._groups.inside is not None


class UnusedParameters:
    """Keeps the residuals of parameters that no rank used in a step: DDP drops any gradient written for them."""

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
