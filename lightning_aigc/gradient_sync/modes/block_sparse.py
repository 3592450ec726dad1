"""The sparse modes: a few blocks of each unit are sent, the same blocks from every rank.

All ranks must select equally without communication, so they use numbers that all of them have: the last sum, and the
steps that a block has waited. The values are then summed like a dense vector, and the bytes do not grow with the number
of ranks. Blocks that are not selected stay in the residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_aigc.gradient_sync.modes.reductions import BlockQuantizer, Reducing, Reduction, in_bfloat16, in_two_hops
from lightning_aigc.gradient_sync.transport.collectives import CountedGroup
from lightning_aigc.gradient_sync.units import ALIGNMENT, FlatUnit, entry_of_each_block
from lightning_aigc.host_state import to_cpu

BLOCK = ALIGNMENT
"""Block size; a block's energy is one number, and no block has values of two parameters."""
FOR_THE_OLDEST = 0.25
"""Share of a step's blocks that is selected by age, so that no block waits forever."""
LEAST_SHARE = 0.25
"""A layer sends at least this times its even share, however small its gradients are."""


class BlockSparse(Reduction):
    """Sends blocks of 256 values, selected by energy and age; the total is divided among layers by gradient size.

    The energies are those of the last step's sum of gradients and residuals: one step old, and free.
    """

    def __init__(
        self, layers: dict[int, Tensor], density: float, quantizer: BlockQuantizer | None, *, adaptive: bool
    ) -> None:
        """Args: layers: the layer of each block of each unit, int64 [K], counted through all units."""
        self._layers, self._density, self._quantizer, self._adaptive = layers, density, quantizer, adaptive
        self._energy = {index: torch.ones(of.numel(), device=of.device) for index, of in layers.items()}
        self._age = {
            index: torch.zeros(of.numel(), dtype=torch.int32, device=of.device) for index, of in layers.items()
        }
        self._next: dict[int, tuple[Tensor, Tensor]] = {}
        self._selected = self._select(self._energy)

    def reduce(self, unit: FlatUnit, e_N: Tensor, group: CountedGroup) -> Reducing:
        selected_K = self._selected[unit.index]
        energies = energies_of(e_N)
        values_N = e_N.view(-1, BLOCK)[selected_K].view(-1)
        if self._quantizer is None:
            packed = torch.cat([values_N, energies])
            wire = yield from in_bfloat16(packed, group)
            values_N, energies = packed[: values_N.numel()], wire[values_N.numel() :].float()
            total = wire[: values_N.numel()].float()
        else:
            energies = energies.bfloat16()
            yield group.all_reduce(energies, "index")
            padded = torch.nn.functional.pad(values_N, (0, -values_N.numel() % (group.size * BLOCK)))
            total, _ = yield from in_two_hops(padded, self._quantizer, group)
            total, values_N = total[: values_N.numel()], padded[: values_N.numel()]
        e_N.view(-1, BLOCK)[selected_K] = values_N.view(-1, BLOCK)
        total_N = torch.zeros_like(e_N)
        total_N.view(-1, BLOCK)[selected_K] = total.view(-1, BLOCK)
        age = self._age[unit.index] + 1
        age[selected_K] = 0
        energies = energies.float()
        self._next[unit.index] = energies, age
        return total_N, energies.sum() + total.sum()

    def observe(self, unit: FlatUnit, total_N: Tensor) -> None:
        self._next[unit.index] = energies_of(total_N), torch.zeros_like(self._age[unit.index])

    def select_by(self, energies: dict[int, Tensor]) -> None:
        """Select this step's blocks by newer energies by unit index, the same on every rank."""
        self._selected = self._select(energies)

    def commit(self) -> None:
        for index, (energy, age) in self._next.items():
            self._energy[index], self._age[index] = energy, age
        self._next = {}
        self._selected = self._select(self._energy)

    def rollback(self) -> None:
        self._next = {}
        self._selected = self._select(self._energy)

    def state_dict(self) -> dict[str, Any]:
        return {
            "energy": to_cpu({str(index): value for index, value in self._energy.items()}, clone=True),
            "age": to_cpu({str(index): value for index, value in self._age.items()}, clone=True),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scores of units of unchanged length; the others start anew."""
        for index, of in self._layers.items():
            energy, age = state["energy"].get(str(index)), state["age"].get(str(index))
            if energy is not None and energy.numel() == of.numel():
                self._energy[index], self._age[index] = energy.to(of.device), age.to(of.device)
        self._selected = self._select(self._energy)

    def _select(self, energies: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the blocks of each unit that are sent, ascending."""
        if not self._layers:
            return {}
        energy, age, layers = (
            torch.cat([d[index] for index in self._layers]) for d in (energies, self._age, self._layers)
        )
        quota_L = quotas(energy, layers, self._density, adaptive=self._adaptive)
        oldest_L = (quota_L * FOR_THE_OLDEST).ceil().long()
        by_energy = rank_within(layers, energy) < (quota_L - oldest_L)[layers]
        by_age = rank_within(layers, torch.where(by_energy, -1, age)) < oldest_L[layers]
        lengths = [of.numel() for of in self._layers.values()]
        parts = torch.split(by_energy | by_age, lengths)
        return {index: part.nonzero().view(-1) for index, part in zip(self._layers, parts, strict=True)}


def quotas(energy: Tensor, layers: Tensor, density: float, *, adaptive: bool) -> Tensor:
    """Return each layer's number of blocks to send, int64 [L]: `density` of all, by sqrt(energy * blocks) or evenly.

    sqrt(energy * blocks) is a layer's blocks times the root mean square of its gradient. A layer sends at least
    LEAST_SHARE of its even share and at least one block, and at most all its blocks.
    """
    blocks_L = torch.bincount(layers).cpu().double()
    even_L = density * blocks_L
    if not adaptive or density == 1:
        return even_L.ceil().long().to(layers.device)
    energy_L = torch.zeros(len(blocks_L), dtype=torch.float64)
    energy_L.index_add_(0, layers.cpu(), energy.cpu().double())
    weight_L = (energy_L * blocks_L).sqrt()
    least_L, wanted = LEAST_SHARE * even_L, even_L.sum()
    low = high = 0.0
    if weight_L.any():  # bracket the factor: all layers at their minimum, all at their maximum
        low, high = float(least_L.min() / weight_L.max()), float(blocks_L.max() / weight_L[weight_L > 0].min())
    for _ in range(60):  # bisect for the factor at which the clamped shares add up to the wanted total
        factor = math.sqrt(low * high)
        if (factor * weight_L).maximum(least_L).minimum(blocks_L).sum() < wanted:
            low = factor
        else:
            high = factor
    shares_L = (high * weight_L).maximum(least_L).minimum(blocks_L)
    return shares_L.round().clamp_min(1).long().to(layers.device)


def rank_within(layers: Tensor, score: Tensor) -> Tensor:
    """Return each block's rank in its layer, 0 for the highest score; ties by position, the same on every rank."""
    by_score = torch.sort(score, descending=True, stable=True).indices
    by_layer = torch.sort(layers[by_score], stable=True)
    order = by_score[by_layer.indices]
    counts_L = torch.bincount(layers)
    first_L = counts_L.cumsum(0) - counts_L
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first_L[by_layer.values]
    return rank


def energies_of(e_N: Tensor) -> Tensor:
    """Return the sum of squares of each block, float32."""
    norms: Tensor = torch.linalg.vector_norm(e_N.view(-1, BLOCK), dim=1)
    return norms.square_()


def layer_of_each_block(units: Sequence[FlatUnit], start: dict[int, int], length: dict[int, int]) -> dict[int, Tensor]:
    """Return the layer of each block that this rank compresses, by unit, counted through all units.

    Padding belongs to the last layer.
    """
    layers, count = {}, 0
    for unit in units:
        first, stop = start[unit.index] // BLOCK, (start[unit.index] + length[unit.index]) // BLOCK
        _, within = torch.unique(entry_of_each_block(unit)[first:stop], return_inverse=True)
        layers[unit.index] = within + count
        count += int(within.max()) + 1
    return layers
