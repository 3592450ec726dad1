"""The wrapper of a fused forward: the choices for its module, and the fallback to the class's own forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_aigc.precision.layers import CannotSwapError

Memory = Literal["off", "balanced", "lean", "max"]
CHOICES = "_fused_backward"
"""Where a swapped module keeps its Choices."""


@dataclass(frozen=True)
class Choices:
    """How one module's fused forward runs."""

    memory: Memory
    """What is computed again; see FusedBackwardPrecision."""
    grad_dtype: torch.dtype | None = None
    """The dtype of backward's products; None is the forward's."""
    input_grad_density: float = 1.0
    """Share of a normalisation's input gradient that is passed on."""
    attention_grad_density: float = 1.0
    """Share of dq, dk and dv that is passed on."""
    repeats: bool = False
    """Whether this module is a block that is run again in backward."""
    protected: frozenset[str] = frozenset()
    """Parts of this module that take no part in what is lossy; their names are the fused forward's own."""

    def of(self, part: str) -> Choices:
        """The choices for one part of the module."""
        return self.lossless() if part in self.protected else self

    def lossless(self) -> Choices:
        """The same without what changes a gradient: for a protected module."""
        return replace(self, grad_dtype=None, input_grad_density=1.0, attention_grad_density=1.0, protected=frozenset())


OFF = Choices("off")


def choices_of(module: nn.Module) -> Choices:
    """What `swap_forwards` chose for a module; off for one that it left alone."""
    found: Choices = module.__dict__.get(CHOICES, OFF)
    return found


def fused_or_own(fused: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is `fused` where that serves the call, the class's own where it raises CannotSwapError first.

    Without gradients the class's own runs: pictures sampled in training are those that any other program samples. So it
    does once the swap is undone, for a wrapper that still calls this forward.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and CHOICES in self.__dict__:
            try:
                call = fused(self, *args, **kwargs)
            except CannotSwapError:
                pass
            else:
                return call()
        return type(self).forward(self, *args, **kwargs)

    return forward


def check_same_dtype(x: Tensor, *tensors: Tensor | None) -> None:
    """Raises: CannotSwapError for dtypes that differ outside autocast, where torch has rules of its own."""
    if torch.is_autocast_enabled(x.device.type):
        return
    other = next((t.dtype for t in tensors if t is not None and t.dtype != x.dtype), None)
    if other is not None:
        raise CannotSwapError(f"input {x.dtype} beside {other} without autocast")
