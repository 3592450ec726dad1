"""Wrap a fused forward with its module's choices and the fallback to the class's forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_aigc.precision.layers import CannotSwapError

Memory = Literal["off", "balanced", "lean", "max"]
CHOICES = "_fused_backward"
"""Attribute of a swapped module with its Choices."""


@dataclass(frozen=True)
class Choices:
    """Options of one module's fused forward."""

    memory: Memory
    """What to recompute; see FusedBackwardPrecision."""
    grad_dtype: torch.dtype | None = None
    """The dtype of backward's products; None is the forward's."""
    input_grad_density: float = 1.0
    """Share of a normalisation's input gradient to keep."""
    attention_grad_density: float = 1.0
    """Share of dq, dk and dv to keep."""
    recomputes: bool = False
    """Whether this module is a block that runs again in backward."""
    protected: frozenset[str] = frozenset()
    """Parts of this module exempt from lossy options, by the fused forward's names for them."""

    def of(self, part: str) -> Choices:
        """The choices for one part of the module."""
        return self.lossless() if part in self.protected else self

    def lossless(self) -> Choices:
        """The same without lossy options, for a protected module."""
        return replace(self, grad_dtype=None, input_grad_density=1.0, attention_grad_density=1.0, protected=frozenset())


OFF = Choices("off")


def choices_of(module: nn.Module) -> Choices:
    """The Choices of a module, OFF if it is not swapped."""
    found: Choices = module.__dict__.get(CHOICES, OFF)
    return found


def fused_or_own(fused: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that runs `fused`, or the class's forward if `fused` raises CannotSwapError.

    The class's forward also runs without gradients, so that pictures sampled in training match those of any other
    program, and after the swap is undone, for a wrapper that still calls this forward.
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
    """Raise CannotSwapError if dtypes differ outside autocast, where torch's promotion rules apply."""
    if torch.is_autocast_enabled(x.device.type):
        return
    other = next((t.dtype for t in tensors if t is not None and t.dtype != x.dtype), None)
    if other is not None:
        raise CannotSwapError(f"input {x.dtype} beside {other} without autocast")
