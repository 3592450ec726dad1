"""Activation checkpointing of blocks, where recomputation skips what backward does not read.

torch.utils.checkpoint recomputes the block. Two things make recomputation cheaper: a long attention's output, small
beside its cost, is saved and reused, and a block's last products are skipped, as backward reads only their inputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from lightning_aigc.precision import saved_tensors
from lightning_aigc.precision.fused_forward import choices_of
from lightning_aigc.precision.host_memory import OnHost, from_host, on_host, to_host
from lightning_aigc_kernels import KnownAttention

LONG_ATTENTION_TOKENS = 512
"""Tokens from which an attention's output is saved: with T tokens it has one number per 2 T products."""


SavedAttention = KnownAttention | tuple[OnHost, ...]
"""An attention as it was computed, or each of its tensors in host memory."""


class _Run:
    """Context of a block's first run or of its recomputations."""

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
        self.outer: _Run | None = None

    def __enter__(self) -> None:
        self.position = 0
        self.outer, _current.run = _current.run, self
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        _current.run = self.outer


class _Current(threading.local):
    run: _Run | None = None


_current = _Current()  # thread-local, because backward of a CUDA device runs in another thread


def checkpoint_block(
    module: nn.Module,
    block: Callable[..., Tensor],
    *inputs: Any,
    around: tuple[AbstractContextManager[object], AbstractContextManager[object]] | None = None,
) -> Tensor:
    """Return block(*inputs), saving only the inputs and the attentions passed to `save_attention`.

    `around` holds the first run and each recomputation, as `selective.saving_and_reading` does. Where the module's
    choices offload, inputs and attentions wait in host memory. Random states are saved only if `module`, the block's
    module, has an active dropout: reading and restoring them costs the host more time than the kernels of many blocks.
    """
    if torch.compiler.is_compiling():  # the partitioner decides what recomputation needs
        compiled: Tensor = checkpoint(block, *inputs, use_reentrant=False)
        return compiled
    saved: list[SavedAttention] = []
    offloads = choices_of(module).offload
    saved_tensors.note(inputs)

    def contexts() -> tuple[_Run, _Run]:
        first, again = around or (contextlib.nullcontext(), contextlib.nullcontext())
        return _Run(saved, False, offloads, first), _Run(saved, True, offloads, again)

    with on_host() if offloads else contextlib.nullcontext():  # inside the block, checkpoint's own hooks hold
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
        offloads = _current.run.offloads
        _current.run.saved.append(tuple(map(to_host, attention)) if offloads else attention)
        saved_tensors.note(attention)


def saved_attention() -> KnownAttention | None:
    """The attention that the first run saved at this call, None in the first run."""
    if not is_recomputing():
        return None
    run = _current.run
    assert run is not None
    run.position += 1
    saved: Any = run.saved[run.position - 1]
    return tuple(map(from_host, saved)) if run.offloads else saved  # type: ignore[return-value]  # three, as they were
