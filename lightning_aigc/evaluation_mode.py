"""Evaluate a model during its training, and restore its modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Set all submodules to eval mode without gradients, and restore each submodule's mode when the block ends.

    Only the attribute `training` is set; `train()`, which may do more, such as merging LoRA weights, is not called.
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
