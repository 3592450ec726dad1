"""Blocks that no fused forward serves run again in backward: diffusion transformers of any family.

A block runs again at level max, but for products that backward does not read; at lean and balanced the results of its
attentions and matrix products are saved, up to a share or all. A diffusers model names its blocks in
`_repeated_blocks` or `_no_split_modules`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_aigc.precision import recompute
from lightning_aigc.precision.fused_forward import Choices, choices_of
from lightning_aigc.precision.fused_transformer_blocks import forward_for
from lightning_aigc.precision.layers import CannotSwapError, class_path
from lightning_aigc.precision.selective import ALL, Known, Saves, saving_and_reading
from lightning_aigc.sharding.original_class import original_class
from lightning_aigc_kernels.protection import named_modules

MODELS, CONTROLNETS = "diffusers.models.transformers.", "diffusers.models.controlnets."
CONTROL_BLOCKS = ("ZImageControlTransformerBlock",)
"""Classes of blocks that a ControlNet alone has, made after the transformer's."""
NATIVE_UNITS = 18.0
"""Activations of the size of a block's input that native autograd saves: SD 3 18, FLUX.1 15, FLUX.2 20."""
LEAN_SHARE = 0.245
"""Of native's bytes, what a block keeps at level lean."""
KNOWN = "_known_of_its_runs"
"""Attribute of a block with what its last run made, by the shapes of its arguments."""


def whole_blocks(model: nn.Module, served: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of the diffusers transformers in `model`, without those with a part of a class in `served`.

    A transformer's ControlNet names no blocks; it has those of the transformer beside it, or `CONTROL_BLOCKS`.
    """
    kinds: dict[nn.Module, Collection[str]] = {}
    controlnets = []
    for _, module in named_modules(model):
        cls = original_class(module)
        if cls.__module__.startswith(MODELS):
            named = getattr(cls, "_repeated_blocks", None) or getattr(cls, "_no_split_modules", None) or ()
            kinds |= dict.fromkeys(module.modules(), named) if named else {}
        elif cls.__module__.startswith(CONTROLNETS):
            controlnets.append(module)
    every_kind = {*CONTROL_BLOCKS, *(name for names in kinds.values() for name in names)}
    for controlnet in controlnets:
        kinds |= dict.fromkeys(controlnet.modules(), every_kind)
    for name, module in named_modules(model):
        known = original_class(module).__name__ in kinds.get(module, ())
        if known and not any(class_path(part) in served for part in module.modules()):
            yield name, module


def whole_block(self: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """The class's forward, on fused ops where the device has kernels, run again in backward but for what the level or
    the plan saves."""
    choices = choices_of(self)
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # the block itself holds no tensor
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    fused = forward_for(self, device)

    def block(*given: Tensor | None) -> Any:
        together = [other if tensor is None else tensor for tensor, other in zip(given, rest, strict=True)]
        again_args, again_kwargs = tree_unflatten(together, structure)
        if fused is not None:
            with contextlib.suppress(CannotSwapError):
                return fused(self, *again_args, **again_kwargs)
        return type(self).forward(self, *again_args, **again_kwargs)

    def run() -> Any:
        inputs = [tensor for tensor in tensors if tensor is not None]
        saves = saves_of(choices, inputs)
        if torch.compiler.is_compiling():
            return recompute.checkpoint_block(self, block, *tensors)
        known = self.__dict__.setdefault(KNOWN, {}).setdefault(tuple(x.shape for x in inputs), Known())
        around = saving_and_reading(saves, known, sum(x.nbytes for x in inputs))
        return recompute.checkpoint_block(self, block, *tensors, around=around)

    return run


def saves_of(choices: Choices, inputs: Sequence[Tensor]) -> Saves:
    """What a block saves beside its inputs."""
    if choices.keeps is not None:
        return choices.keeps.block or Saves()
    if choices.memory == "max":
        return Saves()
    return Saves(ALL, least_inner(inputs), ALL if choices.memory == "balanced" else LEAN_SHARE)


def least_inner(inputs: Sequence[Tensor]) -> int:
    """The inner dimension from which a product of a block with these arguments is worth saving."""
    return max((x.shape[-1] for x in inputs if x.dim() == 3 and x.is_floating_point()), default=0) // 2


def width_of(block: nn.Module) -> int:
    """The width of a block's activations."""
    return max(int(p.shape[-1]) for p in block.parameters() if p.ndim == 1)
