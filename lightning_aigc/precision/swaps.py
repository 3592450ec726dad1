"""Swap fused forwards into a model's modules and back, and report the modules left unswapped.

A swap sets `forward` on the module; parameters, buffers and state_dict keys do not change.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_aigc.errors import ConfigError
from lightning_aigc.precision.block_options import BlockOptions
from lightning_aigc.precision.blocks import layers
from lightning_aigc.precision.blocks.layers import CannotSwapError, class_path
from lightning_aigc.precision.blocks.rules import CHECKPOINTED_BLOCK, COVERED, find_matches
from lightning_aigc.precision.context import SWAP, SwapState, current
from lightning_aigc.precision.memory.budget import MemoryBudget, MemoryLevel
from lightning_aigc.precision.memory.planner import Planner, roots_of
from lightning_aigc.sharding.local_parts import original_class
from lightning_aigc_kernels.dispatch import KERNEL_DEVICES, why_no_kernel

KERNELS = ("group_norm_silu", "geglu")


@dataclass
class Swapped:
    """The swaps made on one model."""

    memory: MemoryLevel
    blocks: Counter[str] = field(default_factory=Counter)
    """Number of swapped modules by class name, without modules inside a swapped module."""
    left_alone: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of modules that run their class's forward, by class name and reason, also inside swapped modules."""
    saving: float = 0.0
    """Expected share of the blocks' activations that is no longer saved, estimated from channel counts."""
    strict: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device that the ops will run on, as far as known."""
    offload: bool = False
    """Whether the blocks' saved tensors wait in host memory."""
    planner: Planner | None = None
    """Planner of a memory budget; None with a level."""
    _modules: list[nn.Module] = field(default_factory=list, repr=False)
    _laid_out: list[nn.Parameter] = field(default_factory=list, repr=False)
    """Weights that are in channels_last until the swaps are undone."""

    def set_device(self, device: torch.device) -> None:
        """Set the device that the ops will run on.

        Raises: ConfigError if the swaps are strict and the device's kernels cannot run.
        """
        self.device = device
        self._lay_out()
        if self.strict and device.type in KERNEL_DEVICES and any(map(why_no_kernel, KERNELS)):
            raise ConfigError(f"strict: true, but {kernels_on(device)}; install Triton for it, or set strict: false")

    def _lay_out(self) -> None:
        """Keep the frozen convolutions' weights in channels_last where the device multiplies in it.

        cuDNN multiplies in this layout, and would transpose each weight in each step: on an H100 a quarter of the
        card's time in a step of Stable Diffusion 1.5. Quantized, sharded and streamed weights stay as they are.
        """
        for module in self._modules if multiplies_in_channels_last(self.device) else ():
            weight: Any = getattr(module, "weight", None)
            if (
                isinstance(module, nn.Conv2d)
                and type(weight) is nn.Parameter
                and type(weight.data) is torch.Tensor
                and weight.device.type == self.device.type
                and weight.is_contiguous()
                and not weight.requires_grad
            ):
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
                self._laid_out.append(weight)

    def restore(self) -> None:
        """Restore the modules' forwards and the layout of their weights. Idempotent.

        A wrapper around the fused forward stays, and then calls the class's forward.
        """
        if self.planner is not None:
            self.planner.remove()
        for weight in self._laid_out:
            weight.data = weight.data.contiguous()
        self._laid_out.clear()
        for module in self._modules:
            if layers.is_installed(module):
                module.__dict__.pop("forward")
            module.__dict__.pop(SWAP, None)
        self._modules.clear()

    def summary(self) -> str:
        """One line with the number of swapped blocks, the expected saving, the kernels, and the blocks left alone."""
        memory = self.memory if self.planner is None else self.planner.budget
        swapped, left = self.blocks.total(), self.left_alone.total()
        if swapped:
            kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.blocks.items()))
            line = f"memory={memory}: swapped {swapped} of {swapped + left} blocks ({kinds})"
            if self.planner is None:
                line += f", keeping about {1 - self.saving:.0%} of their activations"
                line += ", inputs in host memory" * self.offload
            else:
                line += ", the first step keeping the least"
            line += f"; {kernels_on(self.device)}"
        else:
            line = f"memory={memory}: swapped nothing, backward keeps what it kept before; covered are {COVERED}"
        if left:
            reasons = "; ".join(f"{count} {name}: {why}" for (name, why), count in sorted(self.left_alone.items()))
            line += f"; left alone: {reasons}"
        return line


def multiplies_in_channels_last(device: torch.device) -> bool:
    """Whether cuDNN multiplies in channels_last on this device, and GroupNorm's kernel reads it: Ampere and later."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and why_no_kernel("group_norm_silu") is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


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
    memory: MemoryLevel | MemoryBudget,
    protect: Sequence[str] = (),
    strict: bool = False,
    grad_dtype: torch.dtype | None = None,
    input_grad_density: float = 1.0,
    attention_grad_density: float = 1.0,
    offload: bool = False,
) -> Swapped:
    """Swap a fused forward into every module that has a swap rule, in place.

    Args: As in FusedBackwardPrecision; `grad_dtype` is the dtype of backward's products, None the forward's.
    Raises: ConfigError for a protect pattern that covers no module; with `strict`, for a module with a rule
        that cannot be swapped, and for a device whose kernels cannot run.
    """
    planner = None
    if isinstance(memory, MemoryBudget):  # without a plan a block saves what it saves at the level "max"
        planner, memory = Planner(memory, model), "max"
    swapped = Swapped(memory, strict=strict, planner=planner, offload=offload)
    swapped.set_device(next((p.device for p in model.parameters()), swapped.device))
    if memory == "off":
        return swapped
    options = BlockOptions(
        memory, grad_dtype, input_grad_density, attention_grad_density, offload=offload, planner=planner
    )
    native = kept = 0.0
    outer_is_swapped: dict[nn.Module, bool] = {}
    recomputed_inside: set[nn.Module] = set()
    """Modules inside a block that backward recomputes."""
    inside_transformer: set[nn.Module] = set()
    """Blocks that are recomputed together with their transformer."""
    for match in find_matches(model, protect):
        module, rule, kind, reason = match.module, match.rule, original_class(match.module).__name__, ""
        try:
            if "forward" in module.__dict__:
                raise CannotSwapError("its forward was replaced before")
            rule.check(module)
            recomputes = memory == "max" and _is_recomputed(module, inside_transformer)
            _install(module, rule.forward, replace(match.options(options), recomputes=recomputes), swapped)
            rule.check_layers(module)
        except CannotSwapError as refusal:
            reason = str(refusal)
            swapped.left_alone[kind, reason] += 1
            if strict:
                swapped.restore()
                raise ConfigError(f"strict: true, but {match.name} ({kind}) cannot be swapped: {reason}") from None
        before, after = (rule.unit(module) * units for units in (rule.native_units, rule.saved_units[memory]))
        if module not in outer_is_swapped:
            inside = _modules_counted_in(module)
            outer_is_swapped |= dict.fromkeys(inside, not reason)
            recomputed_inside |= inside if memory == "max" or rule is CHECKPOINTED_BLOCK else set()
            native, kept = native + before, kept + (before if reason else after)
            if not reason:
                swapped.blocks[kind] += 1
        elif reason and outer_is_swapped[module] and module not in recomputed_inside:
            kept += before - after
    swapped._lay_out()
    if planner is not None:
        for root in roots_of(model, set(swapped._modules)):
            planner.watch(root)
    swapped.saving = max(0.0, 1 - kept / native) if native else 0.0
    return swapped


def fused_or_own(fused: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a fused forward: its result, or that of the class's forward if `fused` raises CannotSwapError.

    The class's forward also runs without gradients, so that images sampled in training match those of any other
    program, and after the swap is undone, for a wrapper that still calls this forward.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: SwapState | None = self.__dict__.get(SWAP)
        if state is not None and (torch.is_grad_enabled() or current.will_run_again):
            options = state.options
            if options.planner is not None and not torch.compiler.is_compiling():
                return options.planner.call(self, options, fused, args, kwargs)
            try:
                call = fused(self, *args, **kwargs)
            except CannotSwapError:
                pass
            else:
                return call()
        return type(self).forward(self, *args, **kwargs)

    return forward


def _install(module: nn.Module, fused: Callable[..., Any], options: BlockOptions, swapped: Swapped) -> None:
    forward = types.MethodType(fused_or_own(fused), module)
    module.__dict__[SWAP] = SwapState(options, forward)
    module.__dict__["forward"] = forward
    swapped._modules.append(module)


def _modules_counted_in(module: nn.Module) -> set[nn.Module]:
    """Return the modules whose memory a block's rule already counts; a transformer's blocks have separate rules."""
    return set() if class_path(module) == layers.TRANSFORMER else set(module.modules()) - {module}


def _is_recomputed(module: Any, inside_transformer: set[nn.Module]) -> bool:
    """Whether backward recomputes this module: a ResNet block, a transformer of one block, or a transformer block.

    The block of a transformer of one block is recomputed with it, and added to `inside_transformer`.
    """
    path = class_path(module)
    if path == layers.TRANSFORMER and len(module.transformer_blocks) == 1:
        inside_transformer.update(module.transformer_blocks)
        return True
    return path == layers.RESNET or (path == layers.TRANSFORMER_BLOCK and module not in inside_transformer)
