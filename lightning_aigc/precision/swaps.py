"""Which modules get a fused forward, why the others keep theirs, and the way back.

A swap sets `forward` on the module itself; parameters, buffers and state_dict keys stay what they were.
"""

from __future__ import annotations

import dataclasses
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import fused_blocks
from lightning_aigc.precision.fused_blocks import ATTENTION, Choices, Memory
from lightning_aigc.precision.layers import CannotSwapError, class_path
from lightning_aigc_kernels.calling import KERNEL_DEVICES, why_no_kernel
from lightning_aigc_kernels.protection import GradientProtection

RESNET = "diffusers.models.resnet.ResnetBlock2D"
TRANSFORMER_BLOCK = "diffusers.models.attention.BasicTransformerBlock"
TRANSFORMER = "diffusers.models.transformers.transformer_2d.Transformer2DModel"
FEED_FORWARD = "diffusers.models.attention.FeedForward"
CONV2D = "torch.nn.modules.conv.Conv2d"
SEQUENTIAL = "torch.nn.modules.container.Sequential"
KERNELS = ("group_norm_silu", "geglu")


@dataclass(frozen=True)
class Row:
    """One kind of module in the table of swaps."""

    check: Callable[[Any], object]
    """Raises CannotSwapError with the reason why a module of this kind keeps its own forward."""
    forward: Callable[..., Any]
    """The fused forward."""
    unit: Callable[[Any], float]
    """A module's tensor of its block's size, against others: channels times pixels, which in a U-Net fall by four where
    channels double."""
    native_units: float
    """Tensors of the block's size that native autograd keeps, with LoRA on the attention."""
    kept_units: dict[str, float]
    """The same after the swap, by memory level."""


TABLE: dict[str, Row] = {
    RESNET: Row(
        fused_blocks.check_resnet,
        fused_blocks.resnet,
        lambda module: 1 / module.out_channels,
        6,
        {"balanced": 2, "lean": 2, "max": 1},
    ),
    TRANSFORMER: Row(
        fused_blocks.check_transformer,
        fused_blocks.transformer,
        lambda module: 1 / module.norm.num_channels,
        2,
        {"balanced": 1, "lean": 1, "max": 1},
    ),
    TRANSFORMER_BLOCK: Row(
        fused_blocks.check_transformer_block,
        fused_blocks.transformer_block,
        lambda module: 1 / module.dim,
        24,
        {"balanced": 14, "lean": 5, "max": 1.5},
    ),
    ATTENTION: Row(
        fused_blocks.check_attention,
        fused_blocks.attention,
        lambda module: 1 / module.query_dim,
        6,
        {"balanced": 4, "lean": 2, "max": 2},
    ),
    FEED_FORWARD: Row(
        fused_blocks.feed_forward_layers,
        fused_blocks.feed_forward_block,
        lambda module: 1 / module.net[2].out_features,
        13,
        {"balanced": 9, "lean": 1, "max": 1},
    ),
    CONV2D: Row(
        fused_blocks.check_frozen_conv,
        fused_blocks.convolution,
        lambda module: module.in_channels / max(module.in_channels, module.out_channels) ** 2,
        1,
        {"balanced": 0, "lean": 0, "max": 0},
    ),
    SEQUENTIAL: Row(
        fused_blocks.triples_of,
        fused_blocks.sequential,
        lambda module: 1 / next(layer.num_channels for layer in module if type(layer) is nn.GroupNorm),
        3,
        {"balanced": 1, "lean": 1, "max": 1},
    ),
}
"""A module's exact class, by dotted name. Whether a swapped module's call is served is asked again at each call."""


@dataclass
class Swapped:
    """The swaps made on one model."""

    memory: Memory
    blocks: Counter[str] = field(default_factory=Counter)
    """Swapped modules by class name."""
    left_alone: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Modules that keep their own forward, by class name and reason."""
    saving: float = 0.0
    """Expected share of the blocks' activations that is no longer kept, from channel counts alone."""
    strict: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the ops will run, as far as known."""
    _modules: list[nn.Module] = field(default_factory=list, repr=False)

    def settle(self, device: torch.device) -> None:
        """Say where the ops will run.

        Raises: ConfigError when the swaps are strict and that device has kernels which cannot run.
        """
        self.device = device
        if self.strict and device.type in KERNEL_DEVICES and any(map(why_no_kernel, KERNELS)):
            raise ConfigError(f"strict=True, but {kernels_on(device)}; install Triton for it, or strict=False")

    def restore(self) -> None:
        """Give the modules their own forwards back; harmless when done already."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
            module.__dict__.pop("_fused_backward", None)
        self._modules.clear()

    def summary(self) -> str:
        """One line: how many of how many blocks, the expected saving, which kernels run where, what was left alone."""
        swapped, left = self.blocks.total(), self.left_alone.total()
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.blocks.items()))
        line = f"memory={self.memory}: swapped {swapped} of {swapped + left} blocks"
        line += f" ({kinds}), keeping about {1 - self.saving:.0%} of their activations; {kernels_on(self.device)}"
        if left:
            reasons = "; ".join(f"{count} {name}: {why}" for (name, why), count in sorted(self.left_alone.items()))
            line += f"; left alone: {reasons}"
        return line


def kernels_on(device: torch.device) -> str:
    """Which implementation of the ops serves a device, in words."""
    if device.type not in KERNEL_DEVICES:
        return f"plain torch on {device.type}"
    reasons = {op: why_no_kernel(op) for op in KERNELS}
    if not any(reasons.values()):
        return f"Triton kernels on {device.type}"
    return f"plain torch on {device.type}: {next(reason for reason in reasons.values() if reason)}"


def swap_forwards(
    model: nn.Module,
    *,
    memory: Memory,
    protect: Sequence[str] = (),
    strict: bool = False,
    grad_dtype: torch.dtype | None = None,
    input_grad_density: float = 1.0,
    attention_grad_density: float = 1.0,
) -> Swapped:
    """Give every module that the table knows a fused forward, in place.

    Args: see FusedBackwardPrecision; `grad_dtype` is the dtype of backward's products, None the forward's.
    Raises: ConfigError for a protect pattern that covers no module; with `strict` for a module of the table that cannot
        be swapped and for a device whose kernels cannot run.
    """
    swapped = Swapped(memory, strict=strict)
    swapped.settle(next((p.device for p in model.parameters()), swapped.device))
    if memory == "off":
        return swapped
    protection = GradientProtection(protect)
    try:
        protection.check(name for name, _ in model.named_modules())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    choices = Choices(memory, grad_dtype, input_grad_density, attention_grad_density)
    native = kept = 0.0
    counted: set[nn.Module] = set()
    for name, module, row in _candidates(model):
        kind = type(module).__name__
        inside = module in counted
        counted.update(_parts_of(module))
        try:
            if "forward" in module.__dict__:
                raise CannotSwapError("its forward was replaced before")
            row.check(module)
        except CannotSwapError as refusal:
            reason = str(refusal)
            if strict:
                swapped.restore()
                raise ConfigError(f"strict=True, but {name} ({kind}) cannot be swapped: {reason}") from None
            units = row.native_units
        else:
            _install(module, row.forward, choices.lossless() if protection.covers(name) else choices, swapped)
            reason, units = "", row.kept_units[memory]
        if inside:
            continue
        if reason:
            swapped.left_alone[kind, reason] += 1
        else:
            swapped.blocks[kind] += 1
        native, kept = native + row.unit(module) * row.native_units, kept + row.unit(module) * units
    if memory == "max":
        _repeat_blocks(model)
    swapped.saving = 1 - kept / native if native else 0.0
    return swapped


def _parts_of(module: nn.Module) -> set[nn.Module]:
    """What a block's own row already speaks for; a transformer's blocks have rows of their own."""
    return set() if class_path(module) == TRANSFORMER else set(module.modules()) - {module}


def _candidates(model: nn.Module) -> Iterator[tuple[str, Any, Row]]:
    """Modules of the table, outermost first; trained convolutions are nobody's block and are passed over."""
    for name, module in model.named_modules():
        row = TABLE.get(class_path(module))
        if row is None:
            continue
        if class_path(module) == CONV2D and any(p.requires_grad for p in module.parameters()):
            continue
        if class_path(module) == SEQUENTIAL and not any(type(layer) is nn.GroupNorm for layer in module):
            continue
        yield name, module, row


def _install(module: nn.Module, forward: Callable[..., Any], choices: Choices, swapped: Swapped) -> None:
    module.__dict__["_fused_backward"] = choices
    module.__dict__["forward"] = types.MethodType(fused_blocks.fused_or_own(forward), module)
    swapped._modules.append(module)


def _repeat_blocks(model: nn.Module) -> None:
    """Mark what is run again in backward: ResNet blocks, transformers of one block, else each transformer block."""
    inside: set[nn.Module] = set()
    module: Any
    for module in model.modules():
        if fused_blocks.choices_of(module).memory == "off":
            continue
        if class_path(module) == TRANSFORMER and len(module.transformer_blocks) == 1:
            inside.update(module.transformer_blocks)
            _repeat(module)
        elif class_path(module) == RESNET or (class_path(module) == TRANSFORMER_BLOCK and module not in inside):
            _repeat(module)


def _repeat(module: nn.Module) -> None:
    module.__dict__["_fused_backward"] = dataclasses.replace(fused_blocks.choices_of(module), repeats=True)
