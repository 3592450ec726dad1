"""Activation checkpointing of blocks, where recomputation skips results that backward does not read.

As torch.utils.checkpoint, with less work for the host, and with torch.utils.checkpoint where random numbers are drawn.
Two things make recomputation cheaper: a long attention's output, which is small for its cost, is saved and
reused, and a block's last products are skipped, as backward reads only their inputs.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from lightning_aigc.precision.context import OnHost, RecomputeRun, SavedAttention, current, note_saved, options_of
from lightning_aigc_kernels import KnownAttention
from lightning_aigc_kernels.dispatch import refuse_functorch

VERSION = operator.attrgetter("_version")
ADAPTER = ("_active_adapter", "_disable_adapters")
"""Attributes of a LoRA layer that say which LoRA is active, and whether it is off."""
OTHER_TENSORS = (
    "backward recomputes a block, and the block saved other tensors than in forward, because it has changed since: keep"
    " its layers, weights (torch.func.functional_call replaces them) and hooks until backward is done, or set memory:"
    " off of FusedBackwardPrecision"
)
LONG_ATTENTION_TOKENS = 512
"""Tokens from which an attention's output is saved: with T tokens it has one number per 2 T products."""


def checkpoint_block(
    module: nn.Module,
    block: Callable[..., Tensor],
    *inputs: Any,
    around: tuple[AbstractContextManager[object], AbstractContextManager[object]] | None = None,
) -> Tensor:
    """Return block(*inputs), saving only the inputs and the attentions passed to `save_attention`.

    If the module's options offload, inputs and attentions wait in host memory. Random states are saved only if `module`
    has an active dropout: reading and restoring them costs the host more time than the kernels of many blocks.

    Args: around: Scopes of the first run and of each recomputation, as `selective.save_and_reuse` returns them.
    """
    if torch.compiler.is_compiling():  # the partitioner decides what recomputation needs
        compiled: Tensor = checkpoint(block, *inputs, use_reentrant=False)
        return compiled
    refuse_functorch("checkpoint")
    saved: list[SavedAttention] = []
    offloads = options_of(module).offload
    note_saved(inputs)
    state = BlockState(module)

    def contexts() -> tuple[RecomputeRun, RecomputeRun]:
        first, again = around or (contextlib.nullcontext(), contextlib.nullcontext())
        return RecomputeRun(saved, False, offloads, first), RecomputeRun(saved, True, offloads, _Restored(state, again))

    if state.has_active_dropout:
        with save_on_host() if offloads else contextlib.nullcontext():  # inside, checkpoint's own hooks hold
            result: Tensor = checkpoint(
                block, *inputs, use_reentrant=False, context_fn=contexts, determinism_check="none",
                preserve_rng_state=True,
            )  # fmt: skip
        return result
    first, again = contexts()
    recomputation = _Recomputation(block, again, inputs, offloads)
    with saved_tensors_hooks(recomputation.pack, _Recomputation.unpack), first:
        return block(*inputs)


class BlockState:
    """The state of a block's LoRA layers, dropouts and trained weights in its first run.

    diffusers' `scale` changes LoRA layers for the time of a forward, and a slider between two of them.
    """

    __slots__ = ("attributes", "has_active_dropout", "trained", "version")

    def __init__(self, module: nn.Module) -> None:
        self.attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Dictionaries of the layers, and the entries of each that decide what it computes, as they are now."""
        self.trained: list[Tensor] = []
        self.has_active_dropout = False
        parts: list[nn.Module | None] = [module]
        for part in parts:  # every call of a block comes here: `modules()` takes several times as long
            if part is None:
                continue
            own = part.__dict__
            if children := own["_modules"]:
                parts += children.values()
            if parameters := own["_parameters"]:
                self.trained += [p for p in parameters.values() if p is not None and p.requires_grad]
            if "_active_adapter" in own:
                self.attributes.append((own, {name: own.get(name) for name in ADAPTER}))
                if isinstance(scaling := own.get("scaling"), dict):
                    self.attributes.append((scaling, scaling.copy()))
            elif "p" in own and isinstance(part, _DropoutNd) and part.p > 0:
                self.attributes.append((own, {"training": part.training}))
                self.has_active_dropout |= part.training
        self.version = sum(map(VERSION, self.trained))

    def has_changed_weights(self) -> bool:
        """Whether a trained weight was changed in place since the first run."""
        return bool(sum(map(VERSION, self.trained)) != self.version)


class _Restored:
    """Scope of a recomputation, with the block's state of its first run."""

    __slots__ = ("changed", "inner", "state")

    def __init__(self, state: BlockState, inner: AbstractContextManager[object]) -> None:
        self.state, self.inner = state, inner
        self.changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Dictionaries whose entries are others now, with these."""

    def __enter__(self) -> None:
        if self.state.has_changed_weights():
            raise RuntimeError(
                "a trained weight was changed in place between forward and backward, which recompute this block with"
                " the new weight; call optimizer.step() after backward"
            )
        for own, before in self.state.attributes:
            now = {name: own.get(name) for name in before}
            if now != before:
                self.changed.append((own, now))
                own.update(before)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        for own, now in self.changed:
            own.update(now)
        self.changed.clear()


class _Slot:
    """A tensor that backward will ask for, empty until its block was recomputed."""

    __slots__ = ("__weakref__", "recomputation", "tensor")

    def __init__(self, recomputation: _Recomputation) -> None:
        self.recomputation, self.tensor = recomputation, None


class _RecomputedError(Exception):
    """All slots are filled; ends a recomputation."""


class _Recomputation:
    """Runs a block again when backward asks for the first of the tensors that it saved.

    As torch.utils.checkpoint's non-reentrant form, with less work for each tensor, and without random states.
    """

    def __init__(
        self, block: Callable[..., Any], again: AbstractContextManager[object], inputs: Sequence[Any], offloads: bool
    ) -> None:
        self.block, self.again = block, again
        self.slots: list[weakref.ref[_Slot]] = []
        """Weak, so that a tensor which nothing will read is not kept."""
        device = next(x.device for x in inputs if x is not None)
        self.device_type = device.type
        self.autocast: tuple[torch.dtype, bool] | None = None
        """autocast's dtype where it is on, and whether it caches cast weights."""
        if torch.is_autocast_enabled(device.type):
            self.autocast = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
        with save_on_host() if offloads else contextlib.nullcontext():
            self.inputs: Any = _save_inputs(torch.empty(0, device=device, requires_grad=True), *inputs)

    def pack(self, tensor: Tensor) -> Tensor | _Slot:
        if type(tensor) is nn.Parameter:  # kept by its module in any case
            return tensor
        slot = _Slot(self)
        self.slots.append(weakref.ref(slot))
        return slot

    @staticmethod
    def unpack(held: Tensor | _Slot) -> Tensor:
        if type(held) is not _Slot:
            return held  # type: ignore[return-value]  # a parameter
        if held.tensor is None:
            held.recomputation.run()
        tensor: Tensor | None = held.tensor
        held.tensor = None
        if tensor is None:
            raise RuntimeError(OTHER_TENSORS)
        return tensor

    def run(self) -> None:
        """Fill the slots."""
        position, last = 0, len(self.slots)

        def pack(tensor: Tensor) -> Tensor | None:
            nonlocal position
            if type(tensor) is nn.Parameter:
                return tensor
            slot = self.slots[position]()
            position += 1
            if slot is not None:
                slot.tensor = tensor.detach()  # type: ignore[assignment]
            if position == last:
                raise _RecomputedError
            return None

        inputs = self.inputs.grad_fn.saved_tensors
        with (
            contextlib.suppress(_RecomputedError), torch.enable_grad(), saved_tensors_hooks(pack, _refuse),
            self._autocast(), self.again,
        ):  # fmt: skip
            self.block(*inputs)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.autocast is not None:
            dtype, is_cached = self.autocast
            return torch.autocast(self.device_type, dtype, cache_enabled=is_cached)
        if torch.is_autocast_enabled(self.device_type):
            return torch.autocast(self.device_type, enabled=False)
        return contextlib.nullcontext()


class _SavedInputs(torch.autograd.Function):
    """Saves tensors through the hooks that hold outside of the block, such as those of an outer checkpoint."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing reads the anchor")


_save_inputs: Any = _SavedInputs.apply


def _refuse(_: object) -> Tensor:
    raise AssertionError("a recomputed block's graph is not used")


def is_inside() -> bool:
    """Whether the running code belongs to a block that backward recomputes, in its first run or again."""
    return not torch.compiler.is_compiling() and current.run is not None


def is_recomputing() -> bool:
    """Whether backward recomputes a block now, so that results it does not read need no values."""
    return not torch.compiler.is_compiling() and current.run is not None and current.run.is_recomputing


def mark_unread(*modules: nn.Module) -> None:
    """Declare in a recomputed block that backward reads no output of these modules, so that they may skip it."""
    if is_recomputing() and current.run is not None:
        current.run.unread.update(modules)


def is_unread(module: nn.Module) -> bool:
    """Whether this module is being recomputed and backward does not read its output."""
    return is_recomputing() and current.run is not None and module in current.run.unread


def save_attention(attention: KnownAttention) -> None:
    """Save an attention of the first run for recomputation, in call order."""
    if not torch.compiler.is_compiling() and current.run is not None and not current.run.is_recomputing:
        offloads = current.run.offloads
        current.run.saved.append(tuple(map(to_host, attention)) if offloads else attention)
        note_saved(attention)


def saved_attention() -> KnownAttention | None:
    """Return the attention that the first run saved at this call, None in the first run."""
    if not is_recomputing():
        return None
    run = current.run
    assert run is not None
    run.position += 1
    saved: Any = run.saved[run.position - 1]
    return tuple(map(from_host, saved)) if run.offloads else saved  # type: ignore[return-value]  # three tensors


def to_host(tensor: Tensor) -> OnHost:
    """Copy a tensor to host memory, pinned if it comes from an accelerator; a CPU tensor is not copied.

    The copy runs on the device's current stream and the host does not wait for it: only `from_host` may read it.
    torch's `save_on_cpu(pin_memory=True)` makes every copy contiguous, and a block would compute with other strides.
    """
    if tensor.device.type == "cpu":
        return tensor.device, tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def from_host(stored: OnHost) -> Tensor:
    """Copy the tensor that `to_host` stored back to its device."""
    device, tensor = stored
    return tensor.to(device, non_blocking=True)


def save_on_host() -> saved_tensors_hooks:
    """Make autograd keep the tensors that it saves in host memory in this scope."""
    return saved_tensors_hooks(to_host, from_host)
