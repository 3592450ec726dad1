"""Checkpointing of diffusion transformers' blocks, of any model family.

At level max, backward recomputes the block except for products that it does not read. At lean and balanced, results of
attentions and matrix products are saved too, up to a share of the bytes or all of them. A diffusers model names its
blocks in `_repeated_blocks` or `_no_split_modules`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_aigc.precision.block_options import UNLIMITED, BlockOptions, SaveLimit
from lightning_aigc.precision.blocks.layers import CannotSwapError, class_path
from lightning_aigc.precision.blocks.mmdit import forward_for
from lightning_aigc.precision.context import SWAP, SwapState, options_of
from lightning_aigc.precision.memory import recompute
from lightning_aigc.precision.memory.profile import LastRunProfile
from lightning_aigc.precision.memory.selective import min_inner_dim, save_and_reuse
from lightning_aigc.sharding.local_parts import original_class

MODELS, CONTROLNETS = "diffusers.models.transformers.", "diffusers.models.controlnets."
CONTROLNET_BLOCKS = ("ZImageControlTransformerBlock",)
"""Block classes that exist only in a ControlNet, modelled on the transformer's."""
NATIVE_UNITS = 18.0
"""Activations of the size of a block's input that native autograd saves: SD 3 18, FLUX.1 15, FLUX.2 20."""
LEAN_SHARE = 0.245
"""Share of native's saved bytes that a block saves at level lean."""


def find_checkpointed_blocks(named: Sequence[tuple[str, nn.Module]], served: Collection[str]) -> set[nn.Module]:
    """Find the blocks of diffusers transformers among named modules, without blocks that contain a class in `served`.

    A transformer's ControlNet names no blocks; its blocks have the classes of the transformer's, or of
    `CONTROLNET_BLOCKS`.
    """
    block_classes: dict[nn.Module, Collection[str]] = {}
    controlnets = []
    for _, module in named:
        cls = original_class(module)
        if cls.__module__.startswith(MODELS):
            names = getattr(cls, "_repeated_blocks", None) or getattr(cls, "_no_split_modules", None) or ()
            block_classes |= dict.fromkeys(module.modules(), names) if names else {}
        elif cls.__module__.startswith(CONTROLNETS):
            controlnets.append(module)
    all_classes = {*CONTROLNET_BLOCKS, *(name for names in block_classes.values() for name in names)}
    for controlnet in controlnets:
        block_classes |= dict.fromkeys(controlnet.modules(), all_classes)
    return {
        module
        for _, module in named
        if original_class(module).__name__ in block_classes.get(module, ())
        and not any(class_path(part) in served for part in module.modules())
        and next(module.parameters(), None) is not None
    }


def checkpointed_block(self: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Run the class's forward under checkpointing, on fused ops where the device has kernels."""
    options = options_of(self)
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # the block itself holds no tensor
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    fused = forward_for(self, device)

    def block(*inputs: Tensor | None) -> Any:
        merged = [other if tensor is None else tensor for tensor, other in zip(inputs, rest, strict=True)]
        block_args, block_kwargs = tree_unflatten(merged, structure)
        if fused is not None:
            with contextlib.suppress(CannotSwapError):
                return fused(self, *block_args, **block_kwargs)
        return type(self).forward(self, *block_args, **block_kwargs)

    def run() -> Any:
        inputs = [tensor for tensor in tensors if tensor is not None]
        limit = save_limit(options, inputs)
        if torch.compiler.is_compiling():
            return recompute.checkpoint_block(self, block, *tensors)
        state: SwapState = self.__dict__[SWAP]
        last_run = state.last_runs.setdefault(tuple(x.shape for x in inputs), LastRunProfile())
        around = save_and_reuse(limit, last_run, sum(x.nbytes for x in inputs))
        return recompute.checkpoint_block(self, block, *tensors, around=around)

    return run


def save_limit(options: BlockOptions, inputs: Sequence[Tensor]) -> SaveLimit:
    """Return the limit on what a block saves beyond its inputs."""
    if options.saved is not None:
        return options.saved.block or SaveLimit()
    if options.memory == "max":
        return SaveLimit()
    return SaveLimit(UNLIMITED, min_inner_dim(inputs), UNLIMITED if options.memory == "balanced" else LEAN_SHARE)


def width_of(block: nn.Module) -> int:
    """Return the width of a block's activations, from its biases and norms, or from its weights if it has none."""
    parameters = list(block.parameters())
    return max(int(p.shape[-1]) for p in [p for p in parameters if p.ndim == 1] or parameters)
