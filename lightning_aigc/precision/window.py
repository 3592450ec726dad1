"""What is counted of one call of a root, and the plan that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import sdpa_flop_count

from lightning_aigc.precision.block_options import Option
from lightning_aigc.precision.budget import GIB, MIB, MemoryBudget
from lightning_aigc.precision.fused_forward import Choices
from lightning_aigc.precision.saved_tensors import SavedBytes, Storages, tensors_in

Signature = tuple[object, ...]


def _flash_for_cpu(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_for_cpu}
"""Operators that torch's own table of operations lacks."""


@dataclass
class Call:
    """What was counted of one block's call."""

    options: list[Option]
    least: int
    """Bytes saved inside the block at least."""
    empty: int
    """Bytes saved inside with `Keeps()`."""
    times: int = 1

    def ways(self) -> list[tuple[int, float]]:
        """Bytes and repeated operations of each option, all calls of the block together."""
        inside = (self.least if option.keeps is None else self.empty + option.saved_bytes for option in self.options)
        return [(self.times * n, self.times * o.repeated) for n, o in zip(inside, self.options, strict=True)]


@dataclass
class Window:
    """One call of a root."""

    plan: Mapping[object, Choices] | None
    """None while it is counted."""
    count: SavedBytes
    owned: frozenset[int] = frozenset()
    calls: dict[tuple[nn.Module, Signature], Call] = field(default_factory=dict)
    native_inside: int = 0
    """Bytes that the blocks' own forwards save inside, beyond what was saved now."""
    native_inputs: Storages = field(default_factory=dict)
    """Blocks' arguments that their own forwards save."""
    operations: float = 0.0
    """Of a native step, estimated from forward."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    largest: int = 0
    """Bytes that the largest block saves natively: what is alive while its backward runs."""

    @property
    def saved(self) -> int:
        return self.count.bytes_beside(())

    @property
    def native(self) -> int:
        """Bytes that native autograd saves."""
        beside = sum(n for address, (_, n) in self.native_inputs.items() if address not in self.count.storages)
        return self.saved + self.native_inside + beside


@dataclass(frozen=True)
class Plan:
    """The choices of a root's call, and what they cost."""

    choices: Mapping[object, Choices]
    kept: int
    native: int
    least: int
    repeated: float
    operations: float
    again: int
    """Blocks that run again."""
    blocks: int
    beside_int8: tuple[int, float] | None = None
    """Bytes that an int8 base would take off, and the operations that the budget would then repeat; None where it would
    change nothing."""

    def summary(self, budget: MemoryBudget) -> str:
        """One line."""
        saved = self.blocks - self.again
        advice = ""
        if self.beside_int8 is not None:
            nbytes, repeated = self.beside_int8
            advice = (
                f"; with base_quantization: int8 the weights take {nbytes / GIB:.3g} GiB less, and about"
                f" {repeated / max(self.operations, 1):.1%} would be repeated"
            )
        return (
            f"memory={budget}: saves {self.kept / MIB:.4g} of native's {self.native / MIB:.4g} MiB"
            f" ({self.kept / max(self.native, 1):.3f}; at least {self.least / max(self.native, 1):.3f}):"
            f" {saved} of {self.blocks} blocks save what pays most, {self.again} run again in backward, which repeats"
            f" about {self.repeated / max(self.operations, 1):.1%} of a step's operations{advice}"
        )


def operations_of_a_step(module: nn.Module, forward: Mapping[Any, int], args: Any, kwargs: Any) -> float:
    """Operations of a module's native step: backward costs as much as forward, attention's half as much again, and the
    gradients of weights as much as the products they are in."""
    total = float(sum(forward.values()))
    weights = sum(p.numel() for p in module.parameters() if p.dim() > 1)
    trained = sum(p.numel() for p in module.parameters() if p.dim() > 1 and p.requires_grad)
    if not trained and not any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
        return total
    attention = sum(count for op, count in forward.items() if "attention" in str(op))
    return 2 * total + 1.5 * attention + total * trained / max(weights, 1)
