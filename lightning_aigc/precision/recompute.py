"""Activation checkpointing of blocks, where recomputation skips what backward does not read.

torch.utils.checkpoint recomputes the block. Two things make recomputation cheaper: a long attention's output, small
beside its cost, is saved and reused, and a block's last products are skipped, as backward reads only their inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from lightning_aigc.precision import saved_tensors
from lightning_aigc_kernels import KnownAttention

LONG_ATTENTION_TOKENS = 512
"""Tokens from which an attention's output is saved: with T tokens it has one number per 2 T products."""


class _Run:
    """Context of a block's first run or of its recomputations."""

    def __init__(self, saved: list[KnownAttention], is_recomputing: bool) -> None:
        self.saved, self.is_recomputing = saved, is_recomputing
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


_current = _Current()  # thread-local, because backward of a CUDA device runs in another thread


def checkpoint_block(module: nn.Module, block: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return block(*inputs), saving only the inputs and the attentions passed to `save_attention`.

    Random states are saved only if `module`, the block's module, has an active dropout: reading and restoring them
    costs the host more time than the kernels of many blocks.
    """
    if torch.compiler.is_compiling():  # the partitioner decides what recomputation needs
        compiled: Tensor = checkpoint(block, *inputs, use_reentrant=False)
        return compiled
    saved: list[KnownAttention] = []
    saved_tensors.note(inputs)

    def contexts() -> tuple[_Run, _Run]:
        return _Run(saved, is_recomputing=False), _Run(saved, is_recomputing=True)

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
    """Whether a dropout in this block is active, for example that of a LoRA on a convolution."""
    return any(isinstance(layer, _DropoutNd) and layer.training and layer.p > 0 for layer in module.modules())


def is_inside() -> bool:
    """Whether a block runs that will be, or is being, recomputed for backward."""
    return not torch.compiler.is_compiling() and _current.run is not None


def is_recomputing() -> bool:
    """Whether a block is being recomputed for backward, so that unsaved results need no values."""
    return not torch.compiler.is_compiling() and _current.run is not None and _current.run.is_recomputing


def mark_unread(*modules: nn.Module) -> None:
    """Declare in a recomputed block that backward reads no output of these modules, so they may skip it."""
    if is_recomputing() and _current.run is not None:
        _current.run.unread.update(modules)


def is_unread(module: nn.Module) -> bool:
    """Whether this module is being recomputed and its output is not read."""
    return is_recomputing() and _current.run is not None and module in _current.run.unread


def save_attention(attention: KnownAttention) -> None:
    """Save an attention of the first run for recomputation, in call order."""
    if not torch.compiler.is_compiling() and _current.run is not None and not _current.run.is_recomputing:
        _current.run.saved.append(attention)
        saved_tensors.note(attention)


def saved_attention() -> KnownAttention | None:
    """The attention that the first run saved at this call, None in the first run."""
    if not is_recomputing():
        return None
    run = _current.run
    assert run is not None
    run.position += 1
    return run.saved[run.position - 1]
