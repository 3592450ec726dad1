"""Evaluate a model in the middle of its training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from lightning_aigc.rng import isolate_rng


@contextlib.contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Switch every submodule to eval mode, without gradients, and each one back to its own mode when the block ends.

    Only the attribute `training` is set: a `train()` that does more, such as merging LoRA weights, is not called.
    """
    training = [m for module in modules for m in module.modules() if m.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluate `model` in a block that restores its modes and every random state; gradients are left alone."""
    with isolate_rng(device), evaluating(model):
        yield
