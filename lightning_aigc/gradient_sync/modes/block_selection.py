"""Gradient accumulation in the sparse modes: blocks selected by the sum so far, while the last micro-batch runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.gradient_sync.executors import Work
from lightning_aigc.gradient_sync.modes.block_sparse import BlockSparse, energies_of
from lightning_aigc.gradient_sync.residual import Residuals
from lightning_aigc.gradient_sync.transport.process_groups import ProcessGroups
from lightning_aigc.gradient_sync.units import FlatUnit, view_of


class BlockSelection:
    """Selects this step's blocks before the last backward pass of an accumulation window."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        units: Sequence[FlatUnit],
        groups: ProcessGroups,
        residuals: Residuals,
        loss_scale: Callable[[], float],
    ) -> None:
        """Args: units: the units that the mode compresses."""
        self._by_name = dict(parameters)
        self.units, self._groups, self._residuals, self._loss_scale = units, groups, residuals, loss_scale
        self.enabled = True
        """Whether to select by the sum of the micro-batches so far, instead of the step before."""
        self.is_accumulating = False
        """Whether `grad` holds gradients of micro-batches that were not synced."""

    def is_due(self, ddp: DistributedDataParallel) -> bool:
        """Whether the forward pass that begins is the last of a window of several micro-batches."""
        # The wrapped module's mode counts: Lightning restores it after validation, and leaves the wrapper in eval.
        if not (ddp.module.training and torch.is_grad_enabled() and self.enabled):
            return False
        was_accumulating, self.is_accumulating = self.is_accumulating, not ddp.require_backward_grad_sync
        return was_accumulating and not self.is_accumulating

    def select(self, reduction: BlockSparse) -> Work:
        """Return the work that selects the blocks. The gradients are read before this returns."""
        share = 1 / (self._groups.world_size * self._loss_scale())
        energies = []
        for unit in self.units:
            flat = self._residuals.next_of(unit)  # free until the step begins
            flat.zero_()
            for entry in unit.entries:
                gradient = self._by_name[entry.name].grad
                if gradient is not None:
                    view_of(flat, entry).copy_(gradient)
            energies.append(energies_of(flat.mul_(share).add_(self._residuals.of(unit))))
        return self._exchange(reduction, energies, torch.cat(energies))

    def _exchange(self, reduction: BlockSparse, energies: Sequence[Tensor], packed: Tensor) -> Work:
        yield self._groups.between.all_reduce(packed, "index")
        parts = torch.split(packed, [energy.numel() for energy in energies])
        reduction.select_by({unit.index: part for unit, part in zip(self.units, parts, strict=True)})
