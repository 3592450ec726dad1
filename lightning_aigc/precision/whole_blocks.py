"""Blocks that no fused forward serves run again in backward, whole: diffusion transformers of any family.

A diffusers model names its blocks in `_repeated_blocks` or `_no_split_modules`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_aigc.precision import recompute
from lightning_aigc.precision.fused_forward import choices_of
from lightning_aigc.precision.layers import CannotSwapError, class_path
from lightning_aigc.precision.saved_tensors import tensors_in
from lightning_aigc.sharding.own_class import own_class
from lightning_aigc_kernels.protection import named_modules

MODELS = "diffusers.models.transformers."
NATIVE_UNITS = 18.0
"""Activations of the size of a block's input that native autograd saves: SD 3 18, FLUX.1 15, FLUX.2 20."""


def whole_blocks(model: nn.Module, served: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of the diffusers transformers in `model`, without those with a part of a class in `served`."""
    kinds: dict[nn.Module, Collection[str]] = {}
    for name, module in named_modules(model):
        cls = own_class(module)
        if cls.__module__.startswith(MODELS):
            named = getattr(cls, "_repeated_blocks", None) or getattr(cls, "_no_split_modules", None) or ()
            kinds |= dict.fromkeys(module.modules(), named) if named else {}
        if cls.__name__ in kinds.get(module, ()) and not any(class_path(part) in served for part in module.modules()):
            yield name, module


def whole_block(self: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """The class's forward, run again in backward."""
    if not choices_of(self).recomputes:
        raise CannotSwapError("its class's forward saves what it saves")
    forward = type(self).forward

    def block(*_: Tensor) -> Any:
        return forward(self, *args, **kwargs)

    return lambda: recompute.checkpoint_block(self, block, *tensors_in((args, kwargs)))


def width_of(block: nn.Module) -> int:
    """The width of a block's activations."""
    return max(int(p.shape[-1]) for p in block.parameters() if p.ndim == 1)
