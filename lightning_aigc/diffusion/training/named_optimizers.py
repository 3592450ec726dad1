"""Optimizers by a short name, each with its usual rate and the package that brings it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch.optim import Optimizer

from lightning_aigc.errors import ModelError

OWN_EXTRA = "'lightning_aigc[optimizers]'"
KEY = "model.init_args.optimizer"


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer's class and the options that suit a fine-tune."""

    class_path: str
    rate: float
    """Rate where `learning_rate` is unset."""
    package: str = ""
    """Argument of pip that brings the class; empty if it is installed with lightning_aigc."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self, name: str) -> type[Optimizer]:
        """The class. Raises: ModelError that says what to install."""
        module, _, attribute = self.class_path.rpartition(".")
        try:
            found: type[Optimizer] = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            install = f"pip install {self.package}" if self.package else "a newer torch"
            raise ModelError(
                f"{KEY}: {name} is {self.class_path}, which does not import ({error}); to get it: {install}"
            ) from error
        except AttributeError as error:
            raise ModelError(f"{KEY}: {name} is {self.class_path}, which this version of {module} lacks") from error
        return found


OPTIMIZERS = {
    "adamw": NamedOptimizer("torch.optim.AdamW", 1e-4, options={"weight_decay": 1e-2}),
    "adamw8bit": NamedOptimizer("bitsandbytes.optim.AdamW8bit", 1e-4, "bitsandbytes", {"weight_decay": 1e-2}),
    "sgd": NamedOptimizer("torch.optim.SGD", 1e-2, options={"momentum": 0.9}),
    "lion": NamedOptimizer("lion_pytorch.Lion", 2e-5, OWN_EXTRA, {"weight_decay": 1e-2}),
    "came": NamedOptimizer("came_pytorch.CAME", 1e-4, OWN_EXTRA, {"weight_decay": 1e-2}),
    "adafactor": NamedOptimizer(
        "transformers.Adafactor",
        1e-4,
        options={"scale_parameter": False, "relative_step": False, "warmup_init": False},
    ),
    "muon": NamedOptimizer("torch.optim.Muon", 1e-3),
    "prodigy": NamedOptimizer("prodigyopt.Prodigy", 1.0, OWN_EXTRA),
    "schedulefree": NamedOptimizer("schedulefree.AdamWScheduleFree", 1e-3, OWN_EXTRA),
    "sgdschedulefree": NamedOptimizer("schedulefree.SGDScheduleFree", 1e-1, OWN_EXTRA),
}
ALIASES = {"adamwschedulefree": "schedulefree"}


def named_optimizer(name: str) -> Callable[[Any], Optimizer]:
    """Return the function that makes the optimizer of this name from parameter groups.

    Case, hyphens and underscores do not count: `AdamW8bit`, `schedule-free`.

    Raises: ModelError for a name that is not in `OPTIMIZERS`, or one whose package is missing.
    """
    short = re.sub(r"[^a-z0-9]", "", name.casefold())
    short = ALIASES.get(short, short)
    if short not in OPTIMIZERS:
        near = get_close_matches(short, OPTIMIZERS, n=1)
        raise ModelError(
            f"{KEY} must be one of {', '.join(OPTIMIZERS)}, or the class path of one that imports; got {name!r}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    return partial(_build, short, OPTIMIZERS[short].load(short))  # which spawned ranks can read


def _build(short: str, made: type[Optimizer], parameters: Any) -> Optimizer:
    named, groups = OPTIMIZERS[short], list(parameters)
    if short == "muon":
        _check_matrices(groups)
    return made(groups, lr=named.rate, **named.options)  # type: ignore[call-arg]


def _check_matrices(groups: list[Any]) -> None:
    """Raise ModelError for weights that are no matrices, which Muon does not train."""
    tensors = [tensor for group in groups for tensor in (group["params"] if isinstance(group, dict) else [group])]
    other = next((tuple(tensor.shape) for tensor in tensors if tensor.dim() != 2), None)
    if other is not None:
        raise ModelError(
            f"{KEY}: muon trains matrices, and a trained weight has the shape {other}; leave convolutions out of"
            " model.init_args.lora_targets, or set optimizer: adamw"
        )
