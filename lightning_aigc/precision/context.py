"""State of the forward that runs in this thread, and the state stored on a swapped module.

`current` is the only thread-local of this package: CUDA's backward recomputes blocks in another thread than forward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_aigc.precision.block_options import OFF, BlockOptions, SavedParts
from lightning_aigc.precision.memory.profile import ForwardProfile, LastRunProfile
from lightning_aigc.precision.memory.saved_tensors import SavedBytes, tensors_in
from lightning_aigc_kernels import KnownAttention

SWAP = "_fused_backward"
"""Attribute of a swapped module with its SwapState."""
OnHost = tuple[torch.device, Tensor]
"""A tensor's device, and its copy in host memory."""
SavedAttention = KnownAttention | tuple[OnHost, ...]
"""Results of an attention, or each of its tensors in host memory."""


@dataclass
class SwapState:
    """State of one swapped module."""

    options: BlockOptions
    forward: Callable[..., Any]
    """Installed forward, to distinguish it from a forward that other code installed."""
    last_runs: dict[tuple[Any, ...], LastRunProfile] = field(default_factory=dict)
    """Profile of a checkpointed block's last run, by its tensor arguments' shapes."""


class RecomputeRun:
    """First run of a recomputed block, or its recomputation; `current.run` while entered."""

    def __init__(
        self,
        saved: list[SavedAttention],
        is_recomputing: bool,
        offloads: bool,
        inner: AbstractContextManager[object],
    ) -> None:
        self.saved, self.is_recomputing, self.offloads, self.inner = saved, is_recomputing, offloads, inner
        self.position = 0
        self.unread: set[nn.Module] = set()
        """Modules whose output backward does not read."""
        self.outer: RecomputeRun | None = None

    def __enter__(self) -> None:
        self.position = 0
        self.inner.__enter__()  # first: it may refuse
        self.outer, current.run = current.run, self

    def __exit__(self, *error: Any) -> None:
        current.run = self.outer
        self.inner.__exit__(*error)


class BlockContext(threading.local):
    """State of the running forward; each field is restored when the scope that set it ends."""

    module: nn.Module | None = None
    """Module whose call is being prepared with `options` instead of its own options."""
    options: BlockOptions = OFF
    child: nn.Module | None = None
    """Block inside the running module that saves `child_saves`."""
    child_saves: SavedParts | None = None
    run: RecomputeRun | None = None
    """Innermost recomputed block that runs now."""
    profile: ForwardProfile | None = None
    """Profile of the running forward of a top-level module, under a memory budget."""
    runs_natively: bool = False
    """Whether blocks run their class's forward, to count its memory."""
    runs_eagerly: bool = False
    """Whether modules run their own forward where a graph could be replayed."""
    will_run_again: bool = False
    """Whether this run without gradients is a training step's, whose backward runs the module again with them."""
    is_inside_block: bool = False
    """Whether a block with planned options runs."""
    is_outermost: bool = True
    """Whether no swapped module runs around the next one."""
    saved: SavedBytes | None = None
    """Count of the bytes that autograd saves."""


current = BlockContext()


def options_of(module: nn.Module) -> BlockOptions:
    """Return the options of a module, OFF if it is not swapped."""
    if current.module is module:
        return current.options
    state: SwapState | None = module.__dict__.get(SWAP)
    return OFF if state is None else state.options


@contextlib.contextmanager
def current_options(module: nn.Module, options: BlockOptions) -> Iterator[None]:
    """Make `options_of(module)` return `options` in this scope."""
    outer = current.module, current.options
    current.module, current.options = module, options
    try:
        yield
    finally:
        current.module, current.options = outer


@contextlib.contextmanager
def child_options(block: nn.Module, saved: SavedParts | None) -> Iterator[None]:
    """Make `saved_by_child(block)` return `saved` in this scope."""
    if saved is None:  # torch.compile breaks its graph at a change of `current` inside a recomputed block
        yield
        return
    outer = current.child, current.child_saves
    current.child, current.child_saves = block, saved
    try:
        yield
    finally:
        current.child, current.child_saves = outer


def saved_by_child(block: nn.Module) -> SavedParts | None:
    """Return the results that the surrounding module chose for this block to save, None if it chose none."""
    return current.child_saves if current.child is block else None


@contextlib.contextmanager
def _switched_on(name: str) -> Iterator[None]:
    outer = getattr(current, name)
    setattr(current, name, True)
    try:
        yield
    finally:
        setattr(current, name, outer)


def without_graphs() -> AbstractContextManager[None]:
    """Run modules eagerly in this scope, for hooks that must see each call."""
    return _switched_on("runs_eagerly")


def first_run() -> AbstractContextManager[None]:
    """Run swapped modules as with gradients, in a scope without them that backward will run again."""
    return _switched_on("will_run_again")


@contextlib.contextmanager
def count_saved(owned: frozenset[int] = frozenset()) -> Iterator[SavedBytes]:
    """Count the bytes that autograd saves in this scope, without the storages at the addresses `owned`."""
    count = SavedBytes(owned)
    outer, current.saved = current.saved, count
    try:
        with saved_tensors_hooks(count.pack, _unpack):
            yield count
    finally:
        current.saved = outer


def note_saved(held: Any) -> None:
    """Count tensors, in any nesting, that backward will read and that autograd's hooks do not see."""
    if current.saved is not None:
        for tensor in tensors_in(held):
            current.saved.add(tensor)


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
