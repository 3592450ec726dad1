"""FusedBackwardPrecision: a precision plugin that swaps in fused forwards, which save fewer activations."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_aigc._lightning import (
    GradClipAlgorithmType,
    HalfPrecision,
    LightningModule,
    MixedPrecision,
    Precision,
    TrainerFn,
    _optimizer_handles_unscaling,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_aigc.devices import grad_scaler
from lightning_aigc.precision.arguments import (
    MemoryArgument,
    PrecisionName,
    check_arguments,
    check_protection,
)
from lightning_aigc.precision.memory.budget import MemoryBudget, MemoryLevel, read_budget
from lightning_aigc.precision.nan.overflow import SkippedSteps
from lightning_aigc.protocols import ProtectsGradients
from lightning_aigc.rng import random_states
from lightning_aigc_kernels.dispatch import KERNEL_DEVICES
from lightning_aigc_kernels.protection import named_modules

if TYPE_CHECKING:
    from lightning_aigc.precision.graph.device_graphs import Graphs
    from lightning_aigc.precision.graph.graphed_root import GraphedRoot
    from lightning_aigc.precision.swaps import Swapped

SWAPPED = "_fused_backward_swaps"
"""Attribute of a converted module with its swaps, so that any plugin can undo them; copies have separate ones."""


class FusedBackwardPrecision(Precision):
    """Trains in a given precision, with fused forwards of blocks that save less for backward.

    `Trainer(plugins=[FusedBackwardPrecision("bf16-mixed")])`. Leave the Trainer's `precision` unset, or Lightning
    raises "Received both `precision=…` and `plugins=FusedBackwardPrecision(…)`". Parameters and state_dict keys do not
    change; the model's forwards are restored at the end of the run. Without a Trainer, `convert_module(model)` swaps
    and `teardown()` restores.

    Under a dynamic loss scale (16-mixed, bf16-forward-fp16-backward) a gradient that is not finite skips the step and
    halves the scale, as torch's GradScaler does. The step then runs once more under hooks, and a log line names the
    module that first computed such a value. A fused optimizer skips on the device without notice: there the loss scale
    is read from an asynchronous copy, and the line names no module.

    Args:
        precision: 32-true; bf16-mixed; 16-mixed, with a dynamic loss scale; bf16-true;
            bf16-forward-fp16-backward: float32 weights, bfloat16 autocast, and the fused operators' backward products
            in float16 under a dynamic loss scale.
        memory: How much to recompute in backward. off: nothing is swapped, bit-identical to Lightning's precision;
            balanced: element-wise work and each attention's query; lean: cheap products too; max: full blocks.
            Or a budget, for which each block's share is planned from the first step's shapes: {"kept": 0.18}, a share
            of the activations that native autograd saves; {"peak_gb": 6}, GiB of a full step; "fit", all memory of the
            device.
        offload: With memory="max": keep the blocks' saved tensors, which are their inputs and long attentions' outputs,
            in host memory, pinned if there is an accelerator. Results are bit-identical.
        protect: Module-name patterns (`vae.decoder`, `*.mid_block.attentions`) whose gradients stay dense and in full
            precision under every lossy option.
        strict: Raise at fit start for a supported block, or part of one, that would run its class's forward, and for a
            CUDA or NPU device whose kernels cannot run. A single call's inputs, such as a mask or float64, are not
            checked: such a call runs the class's forward or the ops' torch reference.
        input_grad_density: Share of the largest entries of GroupNorm+SiLU's input gradient to keep; 1 keeps all.
        attention_grad_density: Share of the largest entries of attention's dq, dk and dv to keep per head; 1 keeps all.
        graph: Record forward and backward of the denoiser and the ControlNet as graphs of the device, one pair for
            each kind of shapes from its third call on, and replay them: a step then costs what the card costs, and not
            what Python takes. For cuda and npu; what cannot be recorded runs eagerly, and a log line says why. auto:
            where a small graph, recorded at the start of a fit, gives eager's numbers, and without `offload`.

    Raises: ConfigError naming the wrong argument.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[FusedBackwardPrecision("bf16-mixed", memory="lean")])
    """

    precision: PrecisionName  # type: ignore[assignment]  # adds a name to Lightning's

    def __init__(
        self,
        precision: PrecisionName = "bf16-mixed",
        memory: MemoryArgument = "lean",
        protect: Sequence[str] = (),
        strict: bool = False,
        input_grad_density: float = 1.0,
        attention_grad_density: float = 1.0,
        offload: bool = False,
        graph: bool | Literal["auto"] = "auto",
    ) -> None:
        budget = read_budget(memory)
        if memory is False:
            memory = "off"
        densities = {"input_grad_density": input_grad_density, "attention_grad_density": attention_grad_density}
        check_arguments(precision, budget or memory, protect, strict, densities, offload, graph)
        self.precision = precision
        self.memory: MemoryLevel | MemoryBudget = budget or memory  # type: ignore[assignment]  # checked above
        self.protect = tuple(protect)
        self.strict = strict
        self.offload = offload
        self.graph = graph
        self.input_grad_density = float(input_grad_density)
        self.attention_grad_density = float(attention_grad_density)
        self._stock: Precision | None = None
        self._device: torch.device | None = None
        self._module: nn.Module | None = None
        self._saved_scaler: dict[str, Any] = {}
        self._skipped = SkippedSteps(self.forward_context)
        self._graphed: list[GraphedRoot] = []

    def __repr__(self) -> str:
        memory = self.memory if isinstance(self.memory, MemoryBudget) else repr(self.memory)
        offload = ", offload=True" * self.offload
        graph = "" if self.graph == "auto" else f", graph={self.graph}"
        return f"{type(self).__name__}(precision={self.precision!r}, memory={memory}{offload}{graph})"

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler; None if the precision has none or the device is not known yet."""
        return self._stock.scaler if isinstance(self._stock, MixedPrecision) else None

    @property
    def plan(self) -> str:
        """Description of a budget's first plan in one line; empty before the first step, and with a level."""
        swapped: Swapped | None = vars(self._module).get(SWAPPED) if self._module is not None else None
        return swapped.planner.line if swapped is not None and swapped.planner is not None else ""

    # The module and its device

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the module's dtype and swap in fused forwards, in place; returns it. Idempotent."""
        # diffusers logs a warning for every `to(dtype)`, even if nothing changes.
        if isinstance(module, LightningModule) or self.precision != "bf16-true" or not _is_all_bfloat16(module):
            module = _deviceless(self.precision).convert_module(module)
        self._module = module
        self._remove_graphs()
        restore_forwards(module)
        protect = (*self.protect, *(module.protected_gradients if isinstance(module, ProtectsGradients) else ()))
        if self.memory == "off":
            check_protection((name for name, _ in named_modules(module)), protect)
        else:
            from lightning_aigc.precision.swaps import swap_forwards

            module.__dict__[SWAPPED] = swap_forwards(
                module,
                memory=self.memory,
                protect=protect,
                strict=self.strict,
                grad_dtype=torch.float16 if self.precision == "bf16-forward-fp16-backward" else None,
                input_grad_density=self.input_grad_density,
                attention_grad_density=self.attention_grad_density,
                offload=self.offload,
            )
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        self._stock_for(_device_of(model))
        densities = self.input_grad_density, self.attention_grad_density
        if self.protect and min(densities) == 1 and self.precision != "bf16-forward-fp16-backward":
            rank_zero_warn(
                "FusedBackwardPrecision: protect changes nothing where no gradient is computed with a loss; set"
                " input_grad_density or attention_grad_density below 1, or remove protect"
            )
        module = self._module
        swapped: Swapped | None = vars(module).get(SWAPPED) if module is not None else None
        if swapped is not None and self._device is not None:
            swapped.set_device(self._device)  # Lightning moves the module after converting it
            if swapped.planner is not None:
                swapped.planner.optimizers = optimizers
            if isinstance(module, LightningModule) and module.trainer.state.fn == TrainerFn.FITTING:
                rank_zero_info(swapped.summary())
        if module is not None and self._device is not None and self._takes_graphs(self._device):
            self.record_graphs(module, self._device)
        return model, optimizers, lr_schedulers

    def _takes_graphs(self, device: torch.device) -> bool:
        """Whether `graph` asks for graphs on this device, which `auto` tries first."""
        if self.graph != "auto":
            return self.graph
        if self.offload or device.type not in KERNEL_DEVICES:
            return False
        from lightning_aigc.precision.graph.device_graphs import DeviceGraphs, reason_against_graphs

        reason = reason_against_graphs(DeviceGraphs(device), device)
        if reason:
            rank_zero_info(f"graph: auto: the model runs eagerly: {reason}")
        return not reason

    def record_graphs(self, module: nn.Module, device: torch.device, graphs: Graphs | None = None) -> None:
        """Record the calls of the module's networks from now on; `connect` does so with `graph=True`.

        Args:
            graphs: The device's, if None.
        """
        from lightning_aigc.precision.graph.device_graphs import DeviceGraphs
        from lightning_aigc.precision.graph.graphed_root import GraphedRoot, graph_roots

        self._remove_graphs()
        if graphs is None and device.type not in KERNEL_DEVICES:
            rank_zero_info(f"graph: true, but {device.type} has no graphs; the model runs eagerly")
            return
        graphs = graphs or DeviceGraphs(device)
        self._graphed = [GraphedRoot(root, graphs) for root in graph_roots(module)]

    def _remove_graphs(self) -> None:
        for graphed in self._graphed:
            graphed.remove()
        self._graphed = []

    def teardown(self) -> None:
        """Restore the model's forwards; the loss scale stays for the next fit."""
        self._remove_graphs()
        if self._module is not None:
            restore_forwards(self._module)
        self._module = None
        self._skipped.reset()

    def _stock_for(self, device: torch.device) -> Precision:
        """Return Lightning's plugin for this precision on this device, with the current loss scale."""
        if self._stock is None or self._device is None or self._device.type != device.type:
            saved = self.state_dict()
            self._stock = _stock_precision(self.precision, device.type)
            if saved:
                self.load_state_dict(saved)
        self._device = device
        return self._stock

    def _known_stock(self) -> Precision:
        if self._stock is not None:
            return self._stock
        if self._module is None:
            raise RuntimeError("the device is not known yet; call convert_module(model) first, or let a Trainer do it")
        return self._stock_for(_device_of(self._module))

    # Delegated to Lightning's plugin

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return _deviceless(self.precision).tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        return _deviceless(self.precision).module_init_context()

    def convert_input(self, data: Any) -> Any:
        return _deviceless(self.precision).convert_input(data)

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._known_stock().forward_context()

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Run the step under autocast, after recording the random states for a replay of it."""
        stock = self._known_stock()
        if self.scaler is not None and self._device is not None:
            self._skipped.step_states = random_states(self._device)
        with stock.train_step_context():
            yield

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]  # as its parent
        return self._known_stock().pre_backward(tensor, module)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip unscaled gradients; raises for an optimizer that unscales them itself."""
        self._known_stock().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def state_dict(self) -> dict[str, Any]:
        return self._stock.state_dict() if self._stock is not None else self._saved_scaler

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._stock is None:
            self._saved_scaler = state_dict
        elif state_dict:
            self._stock.load_state_dict(state_dict)

    # Overflow

    def optimizer_step(  # type: ignore[override]  # as its parent
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the optimizer step, or skip it and log the reason if a gradient is not finite."""
        stock = self._known_stock()
        scaler = self.scaler
        if scaler is None or not isinstance(optimizer, Optimizer):
            return stock.optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        stepped = has_loss = False

        def watched() -> Any:
            nonlocal has_loss
            result = closure()
            has_loss = result is not None or not model.automatic_optimization
            return result

        def note_step(*_: Any) -> None:
            nonlocal stepped
            stepped = True

        # The scaler has synchronised for its overflow flag already, so checking whether it stepped is free.
        handle = optimizer.register_step_pre_hook(note_step)
        try:
            result = stock.optimizer_step(optimizer, model=model, closure=watched, **kwargs)
        finally:
            handle.remove()
        if _optimizer_handles_unscaling(optimizer):
            self._skipped.check_scale(model, scaler)
        elif stepped:
            self._skipped.note_step_taken()
        elif has_loss:
            self._skipped.report(model, closure, scaler)
        return result


def restore_forwards(module: nn.Module) -> None:
    """Restore the forwards of a module and of every submodule that was converted separately."""
    for submodule in module.modules():
        swapped: Swapped | None = submodule.__dict__.pop(SWAPPED, None)
        if swapped is not None:
            swapped.restore()


def _is_all_bfloat16(module: nn.Module) -> bool:
    tensors = (*module.parameters(), *module.buffers())
    return all(tensor.dtype == torch.bfloat16 for tensor in tensors if tensor.is_floating_point())


def _stock_precision(precision: PrecisionName, device_type: str) -> Precision:
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device_type)
    if precision == "16-mixed":
        return MixedPrecision("16-mixed", device_type, grad_scaler(device_type))
    if precision == "bf16-forward-fp16-backward":
        plugin = MixedPrecision("bf16-mixed", device_type)
        plugin.scaler = grad_scaler(device_type)  # __init__ refuses a scaler with bfloat16
        return plugin
    return _deviceless(precision)


def _deviceless(precision: PrecisionName) -> Precision:
    return HalfPrecision("bf16-true") if precision == "bf16-true" else Precision()


def _device_of(module: nn.Module) -> torch.device:
    tensor: Tensor | None = next(module.parameters(), None)
    if tensor is None:
        tensor = next(module.buffers(), None)
    return torch.device("cpu") if tensor is None else tensor.device
