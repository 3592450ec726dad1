"""Blocks that keep their inputs alone and run again in backward, without what backward does not read.

torch.utils.checkpoint runs the block again. Two things make the second run cheaper: a long attention's output, small
beside its cost, is kept and reused, and a block's last products are skipped, as backward reads only their inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from lightning_aigc_kernels import KnownAttention

LONG_ATTENTION_TOKENS = 512
"""From here on an attention's output is kept: with T tokens it holds one number for every 2 T products it took."""


class _Run:
    """A block's first run or a repetition: a context, entered for each repetition."""

    def __init__(self, kept: list[KnownAttention], repeating: bool) -> None:
        self.kept, self.repeating = kept, repeating
        self.position = 0
        self.unread: set[nn.Module] = set()
        self.outer: _Run | None = None

    def __enter__(self) -> None:
        self.position = 0
        self.outer, _current.run = _current.run, self

    def __exit__(self, *_: object) -> None:
        _current.run = self.outer


class _Current(threading.local):
    run: _Run | None = None


_current = _Current()  # backward of a CUDA device runs in a thread of its own


def run_again_in_backward(module: nn.Module, block: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """block(*inputs), of which backward keeps the inputs and what `remember` was given.

    Random states are kept for the repetition only where an active dropout in `module`, whose block it is, draws from
    them: taking and restoring them costs the host more than many blocks' kernels.
    """
    if torch.compiler.is_compiling():  # whose partitioner decides itself what a repeated run needs
        compiled: Tensor = checkpoint(block, *inputs, use_reentrant=False)
        return compiled
    kept: list[KnownAttention] = []

    def contexts() -> tuple[_Run, _Run]:
        return _Run(kept, repeating=False), _Run(kept, repeating=True)

    result: Tensor = checkpoint(
        block,
        *inputs,
        use_reentrant=False,
        context_fn=contexts,
        determinism_check="none",
        preserve_rng_state=_has_active_dropout(module),
    )
    return result


def _has_active_dropout(module: nn.Module) -> bool:
    """Return whether a dropout in this block is active now, that of a LoRA on a convolution for example."""
    return any(isinstance(layer, _DropoutNd) and layer.training and layer.p > 0 for layer in module.modules())


def repeating() -> bool:
    """Whether a block runs again for backward: results that nothing later keeps need no values."""
    return not torch.compiler.is_compiling() and _current.run is not None and _current.run.repeating


def mark_unread(*modules: nn.Module) -> None:
    """Declare, inside a block that runs again, that backward reads no output of these modules: they may skip it."""
    if repeating() and _current.run is not None:
        _current.run.unread.update(modules)


def is_unread(module: nn.Module) -> bool:
    """Return whether this module runs again and its output is not read."""
    return repeating() and _current.run is not None and module in _current.run.unread


def remember(attention: KnownAttention) -> None:
    """Keep a first run's attention for the repetition, in the order of the calls."""
    if not torch.compiler.is_compiling() and _current.run is not None and not _current.run.repeating:
        _current.run.kept.append(attention)


def recall() -> KnownAttention | None:
    """The attention that the first run kept at this place, None in a first run."""
    if not repeating():
        return None
    run = _current.run
    assert run is not None
    run.position += 1
    return run.kept[run.position - 1]
