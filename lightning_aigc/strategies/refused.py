"""Checks that refuse optimizers and callbacks that a strategy does not support, before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.optim import LBFGS, Optimizer

from lightning_aigc._lightning import BaseFinetuning, StochasticWeightAveraging, Trainer, WeightAveraging
from lightning_aigc.errors import ConfigError


def refuse_optimizers(label: str, optimizers: Sequence[Optimizer], *, shares: bool, cuts: bool) -> None:
    """Check that each optimizer works with lossy gradients, or with states that are divided over the ranks.

    Args: shares: whether each rank steps a part of the parameters; cuts: whether that part is rows of each.
    Raises: ConfigError for one that needs more than one gradient a step, or all parameters at once.
    """
    for configured in optimizers:
        optimizer: Any = getattr(configured, "optimizer", configured)  # one that is wrapped by Lightning
        name, why, instead = type(optimizer).__name__, "", "strategy ddp"
        if _needs_closure(optimizer):
            why = "computes the loss several times a step and compares exact gradients, all parameters at once"
            instead = "AdamW, strategy ddp, or mode: dense of npu_sparse"
        elif shares and any({"d", "k"} <= group.keys() for group in optimizer.param_groups):
            why = "estimates its rate from all parameters, and each rank would estimate another from its share"
            instead = "strategy ddp or npu_sparse, or AdamW"
        elif cuts and ("adafactor" in name.lower() or name == "CAME"):
            why = "factors each gradient by rows and columns, which are cut over the ranks here"
            instead = "strategy zero_1, or AdamW"
        elif cuts and name == "Muon":
            why = "turns each gradient as a whole matrix, whose rows are cut over the ranks here"
            instead = "strategy zero_1, or AdamW"
        elif cuts and type(optimizer).__module__.startswith("bitsandbytes"):
            why = "steps by kernels that read no cut tensors"
            instead = "strategy zero_1, or AdamW"
        elif shares and not cuts and any("train_mode" in group for group in optimizer.param_groups):
            why = "swaps its average in and out of the weights, and a rank has that of its share"
            instead = "strategy zero_2, zero_3 or ddp"
        if why:
            raise ConfigError(f"{label} cannot train with {name}, which {why}; use {instead}")


def refuse_callbacks(label: str, trainer: Trainer) -> None:
    """Check that no Lightning callback copies weights or makes more of them trainable, which shards do not support.

    Raises: ConfigError with the callback's name.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning):
            raise ConfigError(
                f"{label} cuts what is trained over the ranks before the first step, and {name} begins to train more "
                "later; leave it out, or use strategy zero_1 or npu_sparse"
            )
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ConfigError(
                f"{label} cuts weights over the ranks, and {name} averages a copy of the full module; leave it out, "
                "set use_ema: true on the model where it has that, or use strategy zero_1 or npu_sparse"
            )


def _needs_closure(optimizer: Any) -> bool:
    """Whether `step` cannot be called without a function that computes the loss again."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return isinstance(optimizer, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty)
