"""Swap fused forwards into a model's modules and back, and report the modules left unswapped.

A swap sets `forward` on the module; parameters, buffers and state_dict keys do not change.
"""

from __future__ import annotations

import dataclasses
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import (
    attention_blocks,
    convolution_blocks,
    feed_forward_blocks,
    transformer_blocks,
    whole_blocks,
)
from lightning_aigc.precision.arguments import protection_within
from lightning_aigc.precision.attention_blocks import ATTENTION
from lightning_aigc.precision.block_options import FEED_FORWARD, RESNET, TRANSFORMER, TRANSFORMER_BLOCK
from lightning_aigc.precision.budget import MemoryBudget
from lightning_aigc.precision.fused_forward import CHOICES, Choices, Memory, choices_of, fused_or_own
from lightning_aigc.precision.layers import INSTALLED, CannotSwapError, class_path
from lightning_aigc.precision.planner import Planner, roots_of
from lightning_aigc.sharding.original_class import original_class
from lightning_aigc_kernels.dispatch import KERNEL_DEVICES, why_no_kernel
from lightning_aigc_kernels.protection import GradientProtection, named_modules

CONV2D = "torch.nn.modules.conv.Conv2d"
SEQUENTIAL = "torch.nn.modules.container.Sequential"
KERNELS = ("group_norm_silu", "geglu")
COVERED = (
    "diffusers' ResnetBlock2D, Transformer2DModel, BasicTransformerBlock, Attention and FeedForward, frozen Conv2d, "
    "Sequential with GroupNorm, SiLU and Conv2d in a row, and the blocks of diffusion transformers"
)


@dataclass(frozen=True)
class Row:
    """One kind of module in the table of swaps."""

    check: Callable[[Any], object]
    """Raises CannotSwapError if a module of this kind cannot be swapped."""
    forward: Callable[..., Any]
    """The fused forward."""
    unit: Callable[[Any], float]
    """Relative size of a module's activation: channels times pixels, and in a U-Net pixels fall by four where channels
    double."""
    native_units: float
    """Activations of this size that native autograd saves, with LoRA on the attention."""
    kept_units: dict[str, float]
    """The same after the swap, by memory level."""
    check_now: Callable[[Any], object] = lambda module: None
    """Raises CannotSwapError if a swapped module, with its present layers, would still run its class's forward."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Child -> part, for parts that can be protected separately; any other child stands for the whole module."""


TABLE: dict[str, Row] = {
    RESNET: Row(
        convolution_blocks.check_resnet,
        convolution_blocks.resnet,
        lambda module: 1 / module.out_channels,
        6,
        {"balanced": 2, "lean": 2, "max": 1},
        parts={"norm1": "norm1", "conv1": "norm1", "norm2": "norm2", "conv2": "norm2"},
    ),
    TRANSFORMER: Row(
        transformer_blocks.check_transformer,
        transformer_blocks.transformer,
        lambda module: 1 / module.norm.num_channels,
        2,
        {"balanced": 1, "lean": 1, "max": 1},
        parts={"norm": "norm", "proj_in": "norm", "transformer_blocks": "blocks", "proj_out": "last"},
    ),
    TRANSFORMER_BLOCK: Row(
        transformer_blocks.check_transformer_block,
        transformer_blocks.transformer_block,
        lambda module: 1 / module.dim,
        24,
        {"balanced": 14, "lean": 5, "max": 1.5},
        transformer_blocks.check_transformer_block_now,
        parts={"norm1": "attn1", "attn1": "attn1", "norm2": "attn2", "attn2": "attn2", "norm3": "ff", "ff": "ff"},
    ),
    ATTENTION: Row(
        attention_blocks.check_attention,
        attention_blocks.attention,
        lambda module: 1 / module.query_dim,
        6,
        {"balanced": 4, "lean": 2, "max": 2},
        attention_blocks.check_attention_now,
    ),
    FEED_FORWARD: Row(
        feed_forward_blocks.check_feed_forward,
        feed_forward_blocks.feed_forward_block,
        lambda module: 1 / module.net[2].out_features,
        13,
        {"balanced": 9, "lean": 1, "max": 1},
        feed_forward_blocks.feed_forward_layers,
    ),
    CONV2D: Row(
        convolution_blocks.check_frozen_conv,
        convolution_blocks.convolution,
        lambda module: module.in_channels / max(module.in_channels, module.out_channels) ** 2,
        1,
        {"balanced": 0, "lean": 0, "max": 0},
    ),
    SEQUENTIAL: Row(
        convolution_blocks.triples_of,
        convolution_blocks.sequential,
        lambda module: 1 / next(layer.num_channels for layer in module if type(layer) is nn.GroupNorm),
        3,
        {"balanced": 1, "lean": 1, "max": 1},
    ),
}
"""Rows by the dotted name of a module's exact class. Each call of a swapped module is checked again."""
WHOLE_BLOCK = Row(
    lambda module: None,
    whole_blocks.whole_block,
    lambda module: 1 / whole_blocks.width_of(module),
    whole_blocks.NATIVE_UNITS,
    {"balanced": 10, "lean": 4, "max": 1},
)
"""The row of a transformer's block."""


@dataclass
class Swapped:
    """The swaps made on one model."""

    memory: Memory
    blocks: Counter[str] = field(default_factory=Counter)
    """Swapped modules by class name, without those inside a swapped module."""
    left_alone: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Modules that run their class's forward, by class name and reason, including those inside swapped modules."""
    saving: float = 0.0
    """Expected share of the blocks' activations that is no longer saved, estimated from channel counts."""
    strict: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device that the ops will run on, as far as known."""
    offload: bool = False
    """Whether what blocks keep waits in host memory."""
    planner: Planner | None = None
    """With a budget in place of a level."""
    _modules: list[nn.Module] = field(default_factory=list, repr=False)

    def set_device(self, device: torch.device) -> None:
        """Set the device that the ops will run on.

        Raises: ConfigError if the swaps are strict and the device's kernels cannot run.
        """
        self.device = device
        if self.strict and device.type in KERNEL_DEVICES and any(map(why_no_kernel, KERNELS)):
            raise ConfigError(f"strict=True, but {kernels_on(device)}; install Triton for it, or strict=False")

    def restore(self) -> None:
        """Restore the modules' forwards. Idempotent.

        A wrapper around the fused forward stays, and then calls the class's forward.
        """
        if self.planner is not None:
            self.planner.remove()
        for module in self._modules:
            own = module.__dict__
            own.pop(CHOICES, None)
            own.pop(whole_blocks.KNOWN, None)
            if own.pop(INSTALLED, None) is own.get("forward"):
                own.pop("forward", None)
        self._modules.clear()

    @property
    def _asked(self) -> object:
        return self.memory if self.planner is None else self.planner.budget

    def summary(self) -> str:
        """One line with the number of swapped blocks, the expected saving, the kernels, and the blocks left alone."""
        swapped, left = self.blocks.total(), self.left_alone.total()
        if swapped:
            kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.blocks.items()))
            line = f"memory={self._asked}: swapped {swapped} of {swapped + left} blocks ({kinds})"
            if self.planner is None:
                line += f", keeping about {1 - self.saving:.0%} of their activations"
                line += ", inputs in host memory" * self.offload
            else:
                line += ", the first step keeping the least"
            line += f"; {kernels_on(self.device)}"
        else:
            line = f"memory={self._asked}: swapped nothing, backward keeps what it kept before; covered are {COVERED}"
        if left:
            reasons = "; ".join(f"{count} {name}: {why}" for (name, why), count in sorted(self.left_alone.items()))
            line += f"; left alone: {reasons}"
        return line


def kernels_on(device: torch.device) -> str:
    """The implementation of the ops on a device, as text."""
    if device.type not in KERNEL_DEVICES:
        return f"plain torch on {device.type}"
    reasons = {op: why_no_kernel(op) for op in KERNELS}
    if not any(reasons.values()):
        return f"Triton kernels on {device.type}"
    return f"plain torch on {device.type}: {next(reason for reason in reasons.values() if reason)}"


def swap_forwards(
    model: nn.Module,
    *,
    memory: Memory | MemoryBudget,
    protect: Sequence[str] = (),
    strict: bool = False,
    grad_dtype: torch.dtype | None = None,
    input_grad_density: float = 1.0,
    attention_grad_density: float = 1.0,
    offload: bool = False,
) -> Swapped:
    """Swap a fused forward into every module of the table, in place.

    Args: see FusedBackwardPrecision; `grad_dtype` is the dtype of backward's products, None the forward's.
    Raises: ConfigError for a protect pattern that covers no module; with `strict`, for a module of the table that
        cannot be swapped, and for a device whose kernels cannot run.
    """
    planner = None
    if isinstance(memory, MemoryBudget):  # without a plan a block saves what it saves at the level "max"
        planner, memory = Planner(memory, model), "max"
    swapped = Swapped(memory, strict=strict, planner=planner, offload=offload)
    swapped.set_device(next((p.device for p in model.parameters()), swapped.device))
    if memory == "off":
        return swapped
    protected = _names_to_protect(model, protection_within(model, protect))
    choices = Choices(memory, grad_dtype, input_grad_density, attention_grad_density, offload=offload, planner=planner)
    native = kept = 0.0
    outer_is_swapped: dict[nn.Module, bool] = {}
    run_again: set[nn.Module] = set()
    for name, module, row in _candidates(model):
        kind, reason = original_class(module).__name__, ""
        try:
            if "forward" in module.__dict__:
                raise CannotSwapError("its forward was replaced before")
            row.check(module)
            chosen = _choices_for(name, module, row, choices, protected)
            _install(module, row.forward, dataclasses.replace(chosen, is_whole=row is WHOLE_BLOCK), swapped)
            row.check_now(module)
        except CannotSwapError as refusal:
            reason = str(refusal)
            swapped.left_alone[kind, reason] += 1
            if strict:
                swapped.restore()
                raise ConfigError(f"strict=True, but {name} ({kind}) cannot be swapped: {reason}") from None
        before, after = (row.unit(module) * units for units in (row.native_units, row.kept_units[memory]))
        if module not in outer_is_swapped:
            outer_is_swapped |= dict.fromkeys(_parts_of(module), not reason)
            run_again |= _parts_of(module) if memory == "max" or row is WHOLE_BLOCK else set()
            native, kept = native + before, kept + (before if reason else after)
            if not reason:
                swapped.blocks[kind] += 1
        elif reason and outer_is_swapped[module] and module not in run_again:
            kept += before - after
    if memory == "max":
        _recompute_blocks(model)
    if planner is not None:
        for root in roots_of(model):
            planner.watch(root)
    swapped.saving = max(0.0, 1 - kept / native) if native else 0.0
    return swapped


def _names_to_protect(model: nn.Module, protection: GradientProtection) -> dict[str, bool]:
    """True for modules that a pattern covers, False for modules that contain a covered module."""
    found: dict[str, bool] = {}
    for name, _ in named_modules(model) if protection.patterns else ():
        if protection.covers(name):
            found[name] = True
            while name:
                name = name.rpartition(".")[0]
                found.setdefault(name, False)
    return found


def _choices_for(name: str, module: nn.Module, row: Row, choices: Choices, protected: Mapping[str, bool]) -> Choices:
    """The choices for a module: lossless if protected, per part if the row has parts."""
    if name not in protected:
        return choices
    touched = [child for child, _ in module.named_children() if f"{name}.{child}".removeprefix(".") in protected]
    if protected[name] or not all(child in row.parts for child in touched):
        return choices.lossless()
    return dataclasses.replace(choices, protected=frozenset(row.parts[child] for child in touched))


def _parts_of(module: nn.Module) -> set[nn.Module]:
    """The modules that a block's row already covers; a transformer's blocks have separate rows."""
    return set() if class_path(module) == TRANSFORMER else set(module.modules()) - {module}


def _candidates(model: nn.Module) -> Iterator[tuple[str, Any, Row]]:
    """Yield the modules of the table and transformers' blocks, outermost first, without trained convolutions."""
    whole = {module for _, module in whole_blocks.whole_blocks(model, (RESNET, TRANSFORMER, TRANSFORMER_BLOCK))}
    for name, module in named_modules(model):
        row = WHOLE_BLOCK if module in whole else TABLE.get(class_path(module))
        if row is None:
            continue
        if class_path(module) == CONV2D and any(p.requires_grad for p in module.parameters()):
            continue
        if class_path(module) == SEQUENTIAL and not any(type(layer) is nn.GroupNorm for layer in module.children()):
            continue
        yield name, module, row


def _install(module: nn.Module, forward: Callable[..., Any], choices: Choices, swapped: Swapped) -> None:
    own = module.__dict__
    own[CHOICES] = choices
    own["forward"] = own[INSTALLED] = types.MethodType(fused_or_own(forward), module)
    swapped._modules.append(module)


def _recompute_blocks(model: nn.Module) -> None:
    """Mark the blocks to recompute: ResNet blocks, transformers of one block, else each transformer block."""
    inside: set[nn.Module] = set()
    module: Any
    for module in model.modules():
        if choices_of(module).memory == "off":
            continue
        if class_path(module) == TRANSFORMER and len(module.transformer_blocks) == 1:
            inside.update(module.transformer_blocks)
            _recompute(module)
        elif class_path(module) == RESNET or (class_path(module) == TRANSFORMER_BLOCK and module not in inside):
            _recompute(module)


def _recompute(module: nn.Module) -> None:
    module.__dict__[CHOICES] = dataclasses.replace(choices_of(module), recomputes=True)
