"""Plan what each swapped block saves for backward, to a budget of bytes.

Planned is one call of a root, a model's part with swapped blocks, for the shapes of its arguments. The first call of
each signature saves the least, and each block runs up to three times more in it, natively and fused, to count what it
would save. From these counts the plan of the later calls is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import recompute
from lightning_aigc.precision.block_options import ALL, is_optional, options_of
from lightning_aigc.precision.budget import MemoryBudget
from lightning_aigc.precision.footprint import available, besides_activations
from lightning_aigc.precision.fused_forward import CHOICES, Choices, Keeps, choices_of, choosing, handed_to
from lightning_aigc.precision.knapsack import choose
from lightning_aigc.precision.layers import CannotSwapError
from lightning_aigc.precision.saved_tensors import (
    SavedBytes,
    Storages,
    is_checkpointed,
    owned_by,
    storage_of,
    tensors_in,
)
from lightning_aigc.precision.window import COUNTED, Call, Plan, Signature, Window, operations_of_a_step
from lightning_aigc.rng import restore_random_states, tensor_states


class _Running(threading.local):
    window: Window | None = None
    native: bool = False
    """Whether blocks run their class's forward, to be counted."""
    inside: bool = False
    """Whether a block with a choice runs."""
    outermost: bool = True


_running = _Running()


class Planner:
    """Chooses what the swapped blocks of one model save, for each call of its roots."""

    def __init__(self, budget: MemoryBudget, model: nn.Module) -> None:
        self.budget = budget
        self.model = model
        self.optimizers: Sequence[Optimizer] = ()
        self.plans: dict[Signature, Plan] = {}
        self._without_plan: set[Signature] = set()
        self._handles: list[Any] = []
        self.line = ""
        """The first plan in words."""

    def __deepcopy__(self, memo: object) -> Planner:
        return self  # a copy of the model plans with its original

    def watch(self, root: nn.Module) -> None:
        """Plan the calls of a module with swapped blocks."""
        opened: list[Window | None] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            window = self._open(module, args, kwargs)
            opened.append(window)

        def after(module: nn.Module, args: Any, kwargs: Any, output: object) -> None:
            window = opened.pop() if opened else None
            if window is not None:
                self._close(module, args, kwargs, window, failed=output is None)

        self._handles.append(root.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(root.register_forward_hook(after, with_kwargs=True, always_call=True))

    def remove(self) -> None:
        """Stop planning."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _open(self, root: nn.Module, args: Any, kwargs: Any) -> Window | None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_checkpointed():
            return None
        if _running.window is not None or _running.native:
            return None
        signature = signature_of(root, args, kwargs)
        if signature in self._without_plan:
            return None
        plan = self.plans.get(signature)
        if plan is not None:
            window = Window(plan.choices, SavedBytes(frozenset()))
        else:
            owned = owned_by(root)
            window = Window(None, SavedBytes(owned), owned)
            window.count.__enter__()
        _running.window = window
        return window

    def _close(self, root: nn.Module, args: Any, kwargs: Any, window: Window, failed: bool) -> None:
        _running.window = None
        if window.plan is not None:
            return
        window.count.__exit__()
        if not failed and not window.calls:  # compiled, or no block with a choice: nothing to open a window for
            self._without_plan.add(signature_of(root, args, kwargs))
        if not failed and window.calls:
            plan = self._planned(window)
            self.plans[signature_of(root, args, kwargs)] = plan
            if not self.line:
                self.line = plan.summary(self.budget)
                rank_zero_info(self.line)

    def _planned(self, window: Window) -> Plan:
        """The plan for calls like this one.

        Raises: ConfigError if the first plan cannot meet the budget.
        """
        keys, ways = list(window.calls), [call.ways() for call in window.calls.values()]
        inside_now = sum(call.times * call.least for call in window.calls.values())
        fixed, native = window.saved - inside_now, window.native
        least = fixed + sum(min(n for n, _ in of_call) for of_call in ways)
        besides = 0 if self.budget.kept is not None else self._besides(window)
        picks = choose(ways, self._allowed(window, native, besides) - fixed)
        if picks is None:
            if not self.plans:
                raise ConfigError(self.budget.cannot(least, native, besides))
            picks = [min(range(len(of_call)), key=lambda i: of_call[i]) for of_call in ways]
        chosen: dict[object, Choices] = {}
        again = 0
        for key, pick in zip(keys, picks, strict=True):
            keeps = window.calls[key].options[pick].keeps
            again += keeps is None
            if keeps is not None:
                chosen[key] = replace(choices_of(key[0]), keeps=keeps, recomputes=False)
        kept = fixed + sum(of_call[pick][0] for of_call, pick in zip(ways, picks, strict=True))
        repeated = sum(of_call[pick][1] for of_call, pick in zip(ways, picks, strict=True))
        return Plan(chosen, kept, native, least, repeated, window.operations, again, len(keys))

    def _besides(self, window: Window) -> int:
        """Bytes of a step's peak besides saved activations."""
        fixed = besides_activations(self.model, self.optimizers, window.device, window.saved)
        return fixed + window.largest

    def _allowed(self, window: Window, native: int, besides: int) -> float:
        """Bytes that may be saved."""
        if self.budget.kept is not None:
            return self.budget.kept * native
        if self.budget.peak_gb is not None:
            return self.budget.peak_gb * 2**30 - besides
        return available(window.device, self.model) - besides

    def call(
        self, module: Any, choices: Choices, fused: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a swapped module's forward with what the plan chose for this call."""
        if _running.native:
            return type(module).forward(module, *args, **kwargs)
        handed = handed_to(module)
        if handed is not None:
            return _run(module, replace(choices, keeps=handed), fused, args, kwargs)
        if _running.inside or recompute.is_inside():
            return _run(module, choices, fused, args, kwargs)
        window = _running.window
        if window is not None and window.plan is None and _running.outermost and not is_in_backward():
            return self._counted(window, module, choices, fused, args, kwargs)
        return self._chosen(window, module, choices, fused, args, kwargs)

    def _chosen(
        self,
        window: Window | None,
        module: Any,
        choices: Choices,
        fused: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not is_optional(module):
            return _run(module, choices, fused, args, kwargs)
        if is_checkpointed():
            # Whatever a region of torch.utils.checkpoint saves lives shortly: nothing in it is computed a third time.
            choices = replace(choices, recomputes=False, keeps=ALL)
        elif window is not None and window.plan is not None:
            choices = window.plan.get((module, signature_of(module, args, kwargs)), choices)
        elif window is not None:
            return self._with_options(window, module, choices, fused, args, kwargs)
        return _run(module, choices, fused, args, kwargs, inside=True)

    def _counted(
        self,
        window: Window,
        module: Any,
        choices: Choices,
        fused: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an outermost swapped module, after its class's forward was counted."""
        inputs = _storages((args, kwargs))
        given, copies = _in_torchs_layout((args, kwargs))
        with FlopCounterMode(display=False, custom_mapping=COUNTED) as operations:
            natively = self._count_apart(window, lambda: _native(module, *given), args, kwargs)
        if is_checkpointed():
            window.count.storages.update({a: s for a, s in inputs.items() if a not in window.owned})
        before = window.count.bytes_beside(inputs)
        _running.outermost = False
        try:
            output = self._chosen(window, module, choices, fused, args, kwargs)
        finally:
            _running.outermost = True
        inside = natively.bytes_beside(inputs.keys() | copies)
        window.native_inside += inside - (window.count.bytes_beside(inputs) - before)
        saved_inputs = {copies.get(address, address) for address in natively.storages}
        window.native_inputs |= {a: s for a, s in inputs.items() if a in saved_inputs and a not in window.owned}
        window.largest = max(window.largest, inside)
        window.device = tensors_in((args, kwargs))[0].device
        window.operations += operations_of_a_step(module, operations.get_flop_counts()["Global"], args, kwargs)
        return output

    def _with_options(
        self,
        window: Window,
        module: Any,
        choices: Choices,
        fused: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a block with a choice, saving the least, after counting what its options save."""
        inputs = _storages((args, kwargs))
        key = module, signature_of(module, args, kwargs)
        if key in window.calls:
            window.calls[key].times += 1
            return _run(module, choices, fused, args, kwargs, inside=True)
        itemsize = _compute_dtype(args, kwargs).itemsize
        options = options_of(module, args, kwargs, itemsize)
        full = max(options, key=lambda option: option.saved_bytes)

        def saving(keeps: Keeps) -> int:
            given = replace(choices, recomputes=False, keeps=keeps)
            run = lambda: _run(module, given, fused, args, kwargs, inside=True)  # noqa: E731
            return self._count_apart(window, run, args, kwargs).bytes_beside(inputs)

        empty = saving(Keeps())
        if full.keeps is not None and full.saved_bytes:  # softmax tensors differ between devices
            missing = max(0, saving(full.keeps) - empty - full.saved_bytes)
            options = [o if o.keeps is None or not o.saved_bytes else o._replace(saved_bytes=o.saved_bytes + missing)
                       for o in options]  # fmt: skip
        before = window.count.bytes_beside(inputs)
        output = _run(module, choices, fused, args, kwargs, inside=True)
        window.calls[key] = Call(options, window.count.bytes_beside(inputs) - before, empty)
        return output

    def _count_apart(
        self, window: Window, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> SavedBytes:
        """What `run` saves; its result and the random numbers it drew are undone."""
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device("cpu"))
        states = tensor_states(device)
        outermost, _running.outermost = _running.outermost, False
        try:
            with SavedBytes(window.owned) as found:
                run()
        finally:
            _running.outermost = outermost
            restore_random_states(states)
            torch.clear_autocast_cache()
        return found


def _native(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The class's forward of a module, without gradient checkpointing."""
    checkpointing = module.__dict__.get("gradient_checkpointing")
    _running.native = True
    try:
        if checkpointing:
            module.gradient_checkpointing = False
        return type(module).forward(module, *args, **kwargs)
    finally:
        _running.native = False
        if checkpointing:
            module.gradient_checkpointing = checkpointing


def _run(
    module: Any,
    choices: Choices,
    fused: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inside: bool = False,
) -> Any:
    """Run a fused forward, or the class's if it cannot serve the call."""
    outer = _running.inside
    try:
        with choosing(module, choices):
            call = fused(module, *args, **kwargs)
    except CannotSwapError:
        return type(module).forward(module, *args, **kwargs)
    _running.inside = outer or inside
    try:
        return call()
    finally:
        _running.inside = outer


def signature_of(module: nn.Module, args: Any, kwargs: Any) -> Signature:
    """The shapes and dtypes of a call's tensors, the dtype that it computes in, and whether the module trains."""
    tensors = tensors_in((args, kwargs))
    shapes = (((*tensor.shape,), tensor.dtype) for tensor in tensors)
    return id(module), module.training, _compute_dtype(args, kwargs) if tensors else None, *shapes


def is_in_backward() -> bool:
    """Whether autograd's engine runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def _storages(arguments: Any) -> Storages:
    found = (storage_of(tensor) for tensor in tensors_in(arguments))
    return {storage[0]: storage[1:] for storage in found if storage is not None}


def _in_torchs_layout(arguments: Any) -> tuple[Any, dict[int, int]]:
    """Arguments with contiguous tensors, as native forwards would make them, and the copies' storages' originals.

    The fused convolutions give channels_last on a CPU.
    """
    copies: dict[int, int] = {}

    def contiguous(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_contiguous():
            return leaf
        copy = leaf.contiguous()
        old, new = storage_of(leaf), storage_of(copy)
        if old is not None and new is not None:
            copies[new[0]] = old[0]
        return copy

    return tree_map(contiguous, arguments), copies


def _compute_dtype(args: Any, kwargs: Any) -> torch.dtype:
    x: Tensor = tensors_in((args, kwargs))[0]
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def roots_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are called from outside: a plain model, or the parts of a LightningModule or a container."""
    if not isinstance(model, (LightningModule, nn.ModuleList, nn.ModuleDict)):
        if any(CHOICES in module.__dict__ for module in model.modules()):
            yield model
        return
    for child in model.children():
        yield from roots_of(child)
