"""Swap rules: for each supported module class its check, its fused forward and the memory that it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_aigc.precision.arguments import check_protection
from lightning_aigc.precision.block_options import BlockOptions
from lightning_aigc.precision.blocks import attention, checkpointed_blocks, convolution, feed_forward, transformer
from lightning_aigc.precision.blocks.layers import (
    ATTENTION,
    FEED_FORWARD,
    RESNET,
    TRANSFORMER,
    TRANSFORMER_BLOCK,
    class_path,
)
from lightning_aigc_kernels.protection import GradientProtection, named_modules

CONV2D = "torch.nn.modules.conv.Conv2d"
SEQUENTIAL = "torch.nn.modules.container.Sequential"
COVERED = (
    "diffusers' ResnetBlock2D, Transformer2DModel, BasicTransformerBlock, Attention and FeedForward, frozen Conv2d, "
    "Sequential with GroupNorm, SiLU and Conv2d in a row, and the blocks of diffusion transformers"
)


@dataclass(frozen=True)
class SwapRule:
    """Rule for one class of modules."""

    check: Callable[[Any], object]
    """Raises CannotSwapError if a module of this class cannot be swapped."""
    forward: Callable[..., Any]
    """Fused forward."""
    unit: Callable[[Any], float]
    """Relative size of a module's activation: channels times pixels, and in a U-Net pixels fall by four where channels
    double."""
    native_units: float
    """Activations of this size that native autograd saves, with LoRA on the attention."""
    saved_units: dict[str, float]
    """Activations of this size saved after the swap, by memory level."""
    check_layers: Callable[[Any], object] = lambda module: None
    """Raises CannotSwapError if a swapped module with its current layers would still run its class's forward."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Part by child name, for parts that can be protected separately; any other child protects the full module."""


SWAP_RULES: dict[str, SwapRule] = {
    RESNET: SwapRule(
        convolution.check_resnet,
        convolution.resnet,
        lambda module: 1 / module.out_channels,
        6,
        {"balanced": 2, "lean": 2, "max": 1},
        parts={"norm1": "norm1", "conv1": "norm1", "norm2": "norm2", "conv2": "norm2"},
    ),
    TRANSFORMER: SwapRule(
        transformer.check_transformer,
        transformer.transformer,
        lambda module: 1 / module.norm.num_channels,
        2,
        {"balanced": 1, "lean": 1, "max": 1},
        parts={"norm": "norm", "proj_in": "norm", "transformer_blocks": "blocks", "proj_out": "last"},
    ),
    TRANSFORMER_BLOCK: SwapRule(
        transformer.check_transformer_block,
        transformer.transformer_block,
        lambda module: 1 / module.dim,
        24,
        {"balanced": 14, "lean": 5, "max": 1.5},
        transformer.check_transformer_block_layers,
        parts={"norm1": "attn1", "attn1": "attn1", "norm2": "attn2", "attn2": "attn2", "norm3": "ff", "ff": "ff"},
    ),
    ATTENTION: SwapRule(
        attention.check_attention,
        attention.attention,
        lambda module: 1 / module.query_dim,
        6,
        {"balanced": 4, "lean": 2, "max": 2},
        attention.check_attention_layers,
    ),
    FEED_FORWARD: SwapRule(
        feed_forward.check_feed_forward,
        feed_forward.feed_forward_block,
        lambda module: 1 / module.net[2].out_features,
        13,
        {"balanced": 9, "lean": 1, "max": 1},
        feed_forward.feed_forward_layers,
    ),
    CONV2D: SwapRule(
        convolution.check_frozen_conv,
        convolution.convolution,
        lambda module: module.in_channels / max(module.in_channels, module.out_channels) ** 2,
        1,
        {"balanced": 0, "lean": 0, "max": 0},
    ),
    SEQUENTIAL: SwapRule(
        convolution.triples_of,
        convolution.sequential,
        lambda module: 1 / next(layer.num_channels for layer in module if type(layer) is nn.GroupNorm),
        3,
        {"balanced": 1, "lean": 1, "max": 1},
    ),
}
"""Rules by the dotted name of a module's exact class. Each call of a swapped module is checked again."""
CHECKPOINTED_BLOCK = SwapRule(
    lambda module: None,
    checkpointed_blocks.checkpointed_block,
    lambda module: 1 / checkpointed_blocks.width_of(module),
    checkpointed_blocks.NATIVE_UNITS,
    {"balanced": 10, "lean": 4, "max": 1},
)
"""Rule of a diffusion transformer's block."""


@dataclass(frozen=True)
class Match:
    """A module of the model that a swap rule covers."""

    name: str
    module: Any
    rule: SwapRule
    is_protected: bool
    """Whether the full module is exempt from lossy options."""
    protected_parts: frozenset[str]
    """Parts exempt from lossy options."""

    def options(self, options: BlockOptions) -> BlockOptions:
        """Return the model's options adapted to this module."""
        options = replace(options, is_checkpointed_block=self.rule is CHECKPOINTED_BLOCK)
        return options.lossless() if self.is_protected else replace(options, protected=self.protected_parts)


def find_matches(model: nn.Module, protect: Sequence[str]) -> list[Match]:
    """Find the modules that a swap rule covers, outermost first, in one pass over the model.

    Trained convolutions and Sequentials without a GroupNorm are left out.
    Raises: ConfigError for a protect pattern that covers no module.
    """
    named = list(named_modules(model))
    protected = _protected_names((name for name, _ in named), check_protection((name for name, _ in named), protect))
    checkpointed = checkpointed_blocks.find_checkpointed_blocks(named, (RESNET, TRANSFORMER, TRANSFORMER_BLOCK))
    matches = []
    for name, module in named:
        path = class_path(module)
        rule = CHECKPOINTED_BLOCK if module in checkpointed else SWAP_RULES.get(path)
        if rule is None or (path == CONV2D and any(p.requires_grad for p in module.parameters())):
            continue
        if path == SEQUENTIAL and not any(type(layer) is nn.GroupNorm for layer in module.children()):
            continue
        children = [child for child, _ in module.named_children() if f"{name}.{child}".removeprefix(".") in protected]
        is_protected = protected.get(name, False) or not all(child in rule.parts for child in children)
        parts = frozenset() if is_protected else frozenset(rule.parts[child] for child in children)
        matches.append(Match(name, module, rule, is_protected, parts))
    return matches


def _protected_names(names: Iterable[str], protection: GradientProtection) -> dict[str, bool]:
    """Map names of modules that a pattern covers to True, and those of modules around them to False."""
    protected: dict[str, bool] = {}
    for name in names if protection.patterns else ():
        if protection.covers(name):
            protected[name] = True
            while name:
                name = name.rpartition(".")[0]
                protected.setdefault(name, False)
    return protected
