"""Options of a swapped module's forward: dtypes, lossy densities, and what it saves for backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from lightning_aigc.precision.memory.budget import MemoryLevel

UNLIMITED = float("inf")


@dataclass(frozen=True)
class SaveLimit:
    """Limit on the results that a checkpointed block saves beyond its inputs, most operations per byte first."""

    nbytes: float = 0.0
    """Maximum bytes of saved results."""
    min_inner_dim: int = 0
    """Inner dimension from which a product is worth saving. LoRA's second product has a small one: its result takes as
    much memory as its layer's and almost no time to compute."""
    share: float = UNLIMITED
    """Maximum bytes that the block saves with its inputs, as a share of the bytes that native autograd saves."""


@dataclass(frozen=True)
class SavedParts:
    """Intermediate results that one call of a block saves beyond the inputs of its parts."""

    attn1: frozenset[str] = frozenset()
    """Names among output, value, key and query of the self-attention; see `lora_attention`."""
    attn2: frozenset[str] = frozenset()
    """The same for the cross-attention."""
    projection: bool = False
    """Whether the feed-forward's first projection is saved."""
    block: SaveLimit | None = None
    """Limit of a checkpointed transformer block."""


class BlockPlanner(Protocol):
    """Chooses what each call of a swapped module saves."""

    def call(self, module: Any, options: BlockOptions, fused: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the module's forward with the planned options."""


@dataclass(frozen=True)
class BlockOptions:
    """Options of one module's fused forward."""

    memory: MemoryLevel
    """Recomputation level; see FusedBackwardPrecision."""
    grad_dtype: torch.dtype | None = None
    """Dtype of backward's products; None is the forward's."""
    input_grad_density: float = 1.0
    """Share of a normalisation's input gradient to keep."""
    attention_grad_density: float = 1.0
    """Share of dq, dk and dv to keep."""
    recomputes: bool = False
    """Whether backward recomputes this module."""
    protected: frozenset[str] = frozenset()
    """Parts of this module exempt from lossy options, by the fused forward's names for them."""
    saved: SavedParts | None = None
    """Results to save; None follows `memory`."""
    is_checkpointed_block: bool = False
    """Whether this module is a transformer block that runs under checkpointing without a swapped op table."""
    offload: bool = False
    """Whether the saved tensors of a recomputed block wait in host memory."""
    planner: BlockPlanner | None = None
    """Chooses `recomputes` and `saved` for each call, for a memory budget."""

    def for_part(self, part: str) -> BlockOptions:
        """Return the options for one part of the module."""
        return self.lossless() if part in self.protected else self

    def lossless(self) -> BlockOptions:
        """Return the same options without lossy ones, for a protected module."""
        return replace(self, grad_dtype=None, input_grad_density=1.0, attention_grad_density=1.0, protected=frozenset())


OFF = BlockOptions("off")
