"""One call of a swapped module: its forward with given choices, its class's forward, and what each would save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_aigc.precision.fused_forward import Choices, choosing
from lightning_aigc.precision.layers import CannotSwapError
from lightning_aigc.precision.saved_tensors import SavedBytes, Storages, storage_of, tensors_in
from lightning_aigc.precision.window import Signature, Window
from lightning_aigc.rng import restore_random_states, tensor_states


class _Running(threading.local):
    window: Window | None = None
    native: bool = False
    """Whether blocks run their class's forward, to be counted."""
    inside: bool = False
    """Whether a block with a choice runs."""
    outermost: bool = True


running = _Running()


@dataclass(frozen=True)
class BlockCall:
    """A swapped module with its fused forward and the arguments of one call."""

    module: Any
    fused: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, self.kwargs

    @property
    def key(self) -> tuple[Any, Signature]:
        """What a plan chooses for: the module, and the call's signature."""
        return self.module, signature_of(self.module, self.args, self.kwargs)

    def own_forward(self) -> Any:
        """Run the class's forward."""
        return type(self.module).forward(self.module, *self.args, **self.kwargs)

    def natively(self) -> Any:
        """Run the class's forward, of all blocks inside too, without gradient checkpointing."""
        checkpointing = self.module.__dict__.get("gradient_checkpointing")
        running.native = True
        try:
            if checkpointing:
                self.module.gradient_checkpointing = False
            return self.own_forward()
        finally:
            running.native = False
            if checkpointing:
                self.module.gradient_checkpointing = checkpointing

    def run(self, choices: Choices, inside: bool = False) -> Any:
        """Run the fused forward, or the class's if it cannot serve the call."""
        outer = running.inside
        try:
            with choosing(self.module, choices):
                call = self.fused(self.module, *self.args, **self.kwargs)
        except CannotSwapError:
            return self.own_forward()
        running.inside = outer or inside
        try:
            return call()
        finally:
            running.inside = outer


def saved_apart(window: Window, call: BlockCall, run: Callable[[], Any]) -> SavedBytes:
    """What `run` saves; its result and the random numbers it drew are undone."""
    device = next((tensor.device for tensor in tensors_in(call.arguments)), torch.device("cpu"))
    states = tensor_states(device)
    outermost, running.outermost = running.outermost, False
    try:
        with SavedBytes(window.owned) as found:
            run()
    finally:
        running.outermost = outermost
        restore_random_states(states)
        torch.clear_autocast_cache()
    return found


def signature_of(module: nn.Module, args: Any, kwargs: Any) -> Signature:
    """The shapes and dtypes of a call's tensors, the dtype that it computes in, and whether the module trains."""
    tensors = tensors_in((args, kwargs))
    shapes = (((*tensor.shape,), tensor.dtype) for tensor in tensors)
    return id(module), module.training, compute_dtype((args, kwargs)) if tensors else None, *shapes


def compute_dtype(arguments: Any) -> torch.dtype:
    """The dtype that a call computes in: autocast's if it is on, else that of its first tensor."""
    x: Tensor = tensors_in(arguments)[0]
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def storages_in(arguments: Any) -> Storages:
    """The storages of the tensors in nested arguments."""
    found = (storage_of(tensor) for tensor in tensors_in(arguments))
    return {storage[0]: storage[1:] for storage in found if storage is not None}


def in_torchs_layout(call: BlockCall) -> tuple[BlockCall, dict[int, int]]:
    """The call with contiguous tensors, as native forwards would make them, and the copies' storages' originals.

    The fused convolutions give channels_last on a CPU.
    """
    copies: dict[int, int] = {}

    def contiguous(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_contiguous():
            return leaf
        copy = leaf.contiguous()
        old, new = storage_of(leaf), storage_of(copy)
        if old is not None and new is not None:
            copies[new[0]] = old[0]
        return copy

    args, kwargs = tree_map(contiguous, call.arguments)
    return replace(call, args=args, kwargs=kwargs), copies
