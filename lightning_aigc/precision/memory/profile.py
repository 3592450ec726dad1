"""Memory profiles of blocks and of one forward call of a top-level module, and the plan computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import sdpa_flop_count

from lightning_aigc.precision.block_options import BlockOptions, SavedParts
from lightning_aigc.precision.memory.budget import GIB, MIB, MemoryBudget
from lightning_aigc.precision.memory.saved_tensors import SavedBytes, Storages, tensors_in

Signature = tuple[object, ...]


def _flash_for_cpu(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_for_cpu}
"""Operators that are missing in torch's table of operation counts."""


class Result(NamedTuple):
    """A matrix product or an attention that a block computed."""

    kind: Literal["product", "attention"]
    inner_dim: int
    nbytes: int
    operations: float = 0.0
    """Operations of the call; counted only for a plan."""
    is_read: bool = True
    """Whether backward reads the result, or a tensor computed from it."""


@dataclass
class LastRunProfile:
    """Profile of a block's last run with arguments of these shapes; empty before the first run."""

    results: Sequence[Result] = ()
    native_bytes: int = 0
    """Bytes that native autograd saves for the block, with its inputs."""
    saved_tensors: int = 0
    """Number of tensors that autograd saves."""

    def matches(self, results: Sequence[Result], saved_tensors: int) -> bool:
        """Whether another run computed the same results and saved as many tensors."""
        pairs = zip(results, self.results, strict=False)
        alike = all((a.kind, a.inner_dim, a.nbytes) == (b.kind, b.inner_dim, b.nbytes) for a, b in pairs)
        return saved_tensors == self.saved_tensors and len(results) == len(self.results) and alike


class SaveOption(NamedTuple):
    """One way to save a block's activations."""

    saved: SavedParts | None
    """None: backward recomputes the block."""
    saved_bytes: int
    """Bytes beyond what `SavedParts()` saves; 0 for a recomputed block."""
    repeated: float
    """Operations that backward repeats."""


@dataclass
class BlockProfile:
    """Memory profile of one block's calls with one signature."""

    options: list[SaveOption]
    least: int
    """Fewest bytes that a call saves inside the block."""
    empty: int
    """Bytes that a call saves inside the block with `SavedParts()`."""
    times: int = 1
    """Number of calls."""

    def costs(self) -> list[tuple[int, float]]:
        """Return the saved bytes and repeated operations of each option, summed over the calls."""
        inside = (self.least if option.saved is None else self.empty + option.saved_bytes for option in self.options)
        return [(self.times * n, self.times * o.repeated) for n, o in zip(inside, self.options, strict=True)]


@dataclass
class ForwardProfile:
    """Memory profile of one forward call of a top-level module, or the plan that the call follows."""

    planned: Mapping[object, BlockOptions] | None
    """Options of each block's call; None while the forward is profiled."""
    count: SavedBytes = field(default_factory=lambda: SavedBytes(frozenset()))
    scope: ExitStack = field(default_factory=ExitStack)
    """Scope in which `count` counts."""
    owned: frozenset[int] = frozenset()
    """Addresses of the storages of parameters and buffers."""
    blocks: dict[tuple[nn.Module, Signature], BlockProfile] = field(default_factory=dict)
    native_inside: int = 0
    """Bytes that the blocks' class forwards save inside, beyond the bytes that this forward saved."""
    native_inputs: Storages = field(default_factory=dict)
    """Arguments of blocks that their class forwards save."""
    operations: float = 0.0
    """Operations of a native step, estimated from forward."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    largest: int = 0
    """Bytes that the largest block saves natively; they are alive while its backward runs."""

    @property
    def saved(self) -> int:
        """Bytes that this forward saved."""
        return self.count.total()

    @property
    def native(self) -> int:
        """Bytes that native autograd saves."""
        inputs = sum(n for address, (_, n) in self.native_inputs.items() if address not in self.count.storages)
        return self.saved + self.native_inside + inputs


@dataclass(frozen=True)
class Plan:
    """Options for each block's call in a forward of a top-level module, and their cost."""

    options: Mapping[object, BlockOptions]
    kept: int
    """Bytes saved under the plan."""
    native: int
    least: int
    """Bytes saved with every block recomputed."""
    repeated: float
    """Operations that backward repeats."""
    operations: float
    recomputed: int
    """Number of recomputed blocks."""
    blocks: int
    with_int8: tuple[int, float] | None = None
    """Bytes that an int8 base would save, and the operations that the plan would then repeat; None if negligible."""

    def summary(self, budget: MemoryBudget) -> str:
        """Describe the plan in one line."""
        saved = self.blocks - self.recomputed
        advice = ""
        if self.with_int8 is not None:
            nbytes, repeated = self.with_int8
            advice = (
                f"; with base_quantization: int8 the weights take {nbytes / GIB:.3g} GiB less, and about"
                f" {repeated / max(self.operations, 1):.1%} would be repeated"
            )
        return (
            f"memory={budget}: saves {self.kept / MIB:.4g} of native's {self.native / MIB:.4g} MiB"
            f" ({self.kept / max(self.native, 1):.3f}; at least {self.least / max(self.native, 1):.3f}):"
            f" {saved} of {self.blocks} blocks save what pays most, {self.recomputed} run again in backward, which"
            f" repeats about {self.repeated / max(self.operations, 1):.1%} of a step's operations{advice}"
        )


def operations_of_a_step(module: nn.Module, forward: Mapping[Any, int], args: Any, kwargs: Any) -> float:
    """Estimate the operations of a module's native step from those of its forward.

    Backward costs as much as forward, 1.5 times more for attention, and a weight's gradient as much as its product.
    """
    total = float(sum(forward.values()))
    weights = sum(p.numel() for p in module.parameters() if p.dim() > 1)
    trained = sum(p.numel() for p in module.parameters() if p.dim() > 1 and p.requires_grad)
    if not trained and not any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
        return total
    attention = sum(count for op, count in forward.items() if "attention" in str(op))
    return 2 * total + 1.5 * attention + total * trained / max(weights, 1)
