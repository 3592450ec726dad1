"""One call of a swapped module: its fused forward with given options, its class's forward, and the bytes each saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_aigc.precision.block_options import BlockOptions
from lightning_aigc.precision.blocks.layers import CannotSwapError
from lightning_aigc.precision.context import count_saved, current, current_options
from lightning_aigc.precision.memory.profile import ForwardProfile, Signature
from lightning_aigc.precision.memory.saved_tensors import SavedBytes, storage_of, tensors_in
from lightning_aigc.rng import restore_random_states, tensor_states


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
        """The module and the call's signature, for which a plan holds options."""
        return self.module, signature_of(self.module, self.args, self.kwargs)

    def run_class_forward(self) -> Any:
        """Run the class's forward."""
        return type(self.module).forward(self.module, *self.args, **self.kwargs)

    def run_natively(self) -> Any:
        """Run the class's forward of the module and of all blocks inside it, without gradient checkpointing."""
        checkpointing = self.module.__dict__.get("gradient_checkpointing")
        current.runs_natively = True
        try:
            if checkpointing:
                self.module.gradient_checkpointing = False
            return self.run_class_forward()
        finally:
            current.runs_natively = False
            if checkpointing:
                self.module.gradient_checkpointing = checkpointing

    def run(self, options: BlockOptions, is_planned: bool = False) -> Any:
        """Run the fused forward, or the class's forward if the fused one cannot serve the call."""
        outer = current.is_inside_block
        try:
            with current_options(self.module, options):
                forward = self.fused(self.module, *self.args, **self.kwargs)
        except CannotSwapError:
            return self.run_class_forward()
        current.is_inside_block = outer or is_planned
        try:
            return forward()
        finally:
            current.is_inside_block = outer

    def made_contiguous(self) -> tuple[BlockCall, dict[int, int]]:
        """Return the call with contiguous tensors, as native forwards make them, and each copy's original.

        The fused convolutions return channels_last tensors on a CPU. Copies and originals are given by the addresses of
        their storages.
        """
        originals: dict[int, int] = {}

        def contiguous(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.is_contiguous():
                return leaf
            copy = leaf.contiguous()
            old, new = storage_of(leaf), storage_of(copy)
            if old is not None and new is not None:
                originals[new[0]] = old[0]
            return copy

        args, kwargs = tree_map(contiguous, self.arguments)
        return replace(self, args=args, kwargs=kwargs), originals


def saved_by(profile: ForwardProfile, call: BlockCall, run: Callable[[], Any]) -> SavedBytes:
    """Run `run` once more only to count the bytes that it saves, and restore the random states."""
    device = next((tensor.device for tensor in tensors_in(call.arguments)), torch.device("cpu"))
    states = tensor_states(device)
    is_outermost, current.is_outermost = current.is_outermost, False
    try:
        with count_saved(profile.owned) as saved:
            run()
    finally:
        current.is_outermost = is_outermost
        restore_random_states(states)
        torch.clear_autocast_cache()
    return saved


def signature_of(module: nn.Module, args: Any, kwargs: Any) -> Signature:
    """Return the module's id and mode, the dtype it computes in, and the shapes and dtypes of a call's tensors."""
    tensors = tensors_in((args, kwargs))
    shapes = (((*tensor.shape,), tensor.dtype) for tensor in tensors)
    return id(module), module.training, compute_dtype((args, kwargs)) if tensors else None, *shapes


def compute_dtype(arguments: Any) -> torch.dtype:
    """Return the dtype that a call computes in: autocast's if it is on, else that of its first tensor."""
    x: Tensor = tensors_in(arguments)[0]
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
