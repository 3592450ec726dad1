"""Wrap a fused forward with its module's choices and the fallback to the class's forward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lightning_aigc.precision.layers import CannotSwapError
from lightning_aigc.precision.selective import Saves

if TYPE_CHECKING:
    from lightning_aigc.precision.planner import Planner

Memory = Literal["off", "balanced", "lean", "max"]
CHOICES = "_fused_backward"
"""Attribute of a swapped module with its Choices."""


@dataclass(frozen=True)
class Keeps:
    """What one call of a block that is not recomputed saves, besides the inputs of its parts."""

    attn1: frozenset[str] = frozenset()
    """Of the self-attention's output, value, key and query; see `lora_attention`."""
    attn2: frozenset[str] = frozenset()
    """Of the attention to the text's."""
    projection: bool = False
    """Whether the feed-forward's first projection is saved."""
    block: Saves | None = None
    """What a transformer's block saves that runs again."""


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
    keeps: Keeps | None = None
    """What to save in place of what `memory` says."""
    is_whole: bool = False
    """Whether this module is a transformer's block that no fused forward serves."""
    offload: bool = False
    """Whether what a block that runs again keeps waits in host memory."""
    planner: Planner | None = None
    """Chooses `recomputes` and `keeps` for each call, to a budget."""

    def of(self, part: str) -> Choices:
        """The choices for one part of the module."""
        return self.lossless() if part in self.protected else self

    def lossless(self) -> Choices:
        """The same without lossy options, for a protected module."""
        return replace(self, grad_dtype=None, input_grad_density=1.0, attention_grad_density=1.0, protected=frozenset())


OFF = Choices("off")


class _Chosen(threading.local):
    """The choices of the call that is being prepared, in place of the module's."""

    module: nn.Module | None = None
    choices: Choices = OFF


_chosen = _Chosen()  # thread-local, because backward of a CUDA device runs in another thread


def choices_of(module: nn.Module) -> Choices:
    """The Choices of a module, OFF if it is not swapped."""
    if _chosen.module is module:
        return _chosen.choices
    found: Choices = module.__dict__.get(CHOICES, OFF)
    return found


class _Handed(threading.local):
    """What a block's container chose for it."""

    module: nn.Module | None = None
    keeps: Keeps | None = None


_handed = _Handed()


@contextlib.contextmanager
def handing_down(module: nn.Module, keeps: Keeps | None) -> Iterator[None]:
    """While it holds, `handed_to(module)` is `keeps`."""
    outer = _handed.module, _handed.keeps
    _handed.module, _handed.keeps = module, keeps
    try:
        yield
    finally:
        _handed.module, _handed.keeps = outer


def handed_to(module: nn.Module) -> Keeps | None:
    """What the container of this block chose for it, None if nothing."""
    return _handed.keeps if _handed.module is module else None


@contextlib.contextmanager
def choosing(module: nn.Module, choices: Choices) -> Iterator[None]:
    """While it holds, `choices_of(module)` are these."""
    outer = _chosen.module, _chosen.choices
    _chosen.module, _chosen.choices = module, choices
    try:
        yield
    finally:
        _chosen.module, _chosen.choices = outer


def fused_or_own(fused: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that runs `fused`, or the class's forward if `fused` raises CannotSwapError.

    The class's forward also runs without gradients, so that pictures sampled in training match those of any other
    program, and after the swap is undone, for a wrapper that still calls this forward.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        choices: Choices | None = self.__dict__.get(CHOICES)
        if choices is not None and torch.is_grad_enabled():
            if choices.planner is not None and not torch.compiler.is_compiling():
                return choices.planner.call(self, choices, fused, args, kwargs)
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
