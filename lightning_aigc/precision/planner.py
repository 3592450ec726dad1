"""Plan what each swapped block saves for backward, to a budget of bytes.

Planned is one call of a root, a model's part with swapped blocks, for the shapes of its arguments. The first call of
each signature saves the least, and each block runs up to three times more in it, natively and fused, to count what it
would save. From these counts the plan of the later calls is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from lightning_aigc.errors import ConfigError
from lightning_aigc.knapsack import choose
from lightning_aigc.precision import recompute
from lightning_aigc.precision.block_call import (
    BlockCall,
    compute_dtype,
    in_torchs_layout,
    running,
    saved_apart,
    signature_of,
    storages_in,
)
from lightning_aigc.precision.block_options import ALL, is_optional, options_of, options_of_whole
from lightning_aigc.precision.budget import MemoryBudget
from lightning_aigc.precision.footprint import available, besides_activations, int8_would_save
from lightning_aigc.precision.fused_forward import CHOICES, Choices, Keeps, choices_of, handed_to
from lightning_aigc.precision.saved_tensors import (
    SavedBytes,
    is_checkpointed,
    is_in_backward,
    owned_by,
    tensors_in,
)
from lightning_aigc.precision.selective import Result, counted
from lightning_aigc.precision.whole_blocks import least_inner
from lightning_aigc.precision.window import COUNTED, Call, Plan, Signature, Window, operations_of_a_step

WORTH_SAYING = 0.01
"""Share of a step's operations from which the plan says what a packed base would spare."""


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
        if running.window is not None or running.native:
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
        running.window = window
        return window

    def _close(self, root: nn.Module, args: Any, kwargs: Any, window: Window, failed: bool) -> None:
        running.window = None
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
        int8_saves = 0 if self.budget.kept is not None else int8_would_save(self.model)
        allowed = self._allowed(window, native, besides) - fixed
        picks = choose(ways, allowed)
        if picks is None:
            if not self.plans:
                raise ConfigError(self.budget.cannot(least, native, besides, int8_saves))
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
        beside_int8 = None
        beside = choose(ways, allowed + int8_saves) if int8_saves else None
        if beside is not None:
            fewer = sum(of_call[pick][1] for of_call, pick in zip(ways, beside, strict=True))
            beside_int8 = (int8_saves, fewer) if repeated - fewer >= WORTH_SAYING * window.operations else None
        return Plan(chosen, kept, native, least, repeated, window.operations, again, len(keys), beside_int8)

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
        call = BlockCall(module, fused, args, kwargs)
        if running.native:
            return call.own_forward()
        handed = handed_to(module)
        if handed is not None:
            return call.run(replace(choices, keeps=handed))
        if running.inside or recompute.is_inside():
            return call.run(choices)
        window = running.window
        if window is not None and window.plan is None and running.outermost and not is_in_backward():
            return self._counted(window, call, choices)
        return self._chosen(window, call, choices)

    def _chosen(self, window: Window | None, call: BlockCall, choices: Choices) -> Any:
        if not is_optional(call.module):
            return call.run(choices)
        if is_checkpointed():
            # Whatever a region of torch.utils.checkpoint saves lives shortly: nothing in it is computed a third time.
            choices = replace(choices, recomputes=False, keeps=ALL)
        elif window is not None and window.plan is not None:
            choices = window.plan.get(call.key, choices)
        elif window is not None:
            return self._with_options(window, call, choices)
        return call.run(choices, inside=True)

    def _counted(self, window: Window, call: BlockCall, choices: Choices) -> Any:
        """Run an outermost swapped module, after its class's forward was counted."""
        inputs = storages_in(call.arguments)
        given, copies = in_torchs_layout(call)
        with FlopCounterMode(display=False, custom_mapping=COUNTED) as operations:
            natively = saved_apart(window, call, given.natively)
        if is_checkpointed():
            window.count.storages.update({a: s for a, s in inputs.items() if a not in window.owned})
        before = window.count.bytes_beside(inputs)
        running.outermost = False
        try:
            output = self._chosen(window, call, choices)
        finally:
            running.outermost = True
        inside = natively.bytes_beside(inputs.keys() | copies)
        window.native_inside += inside - (window.count.bytes_beside(inputs) - before)
        saved_inputs = {copies.get(address, address) for address in natively.storages}
        window.native_inputs |= {a: s for a, s in inputs.items() if a in saved_inputs and a not in window.owned}
        window.largest = max(window.largest, inside)
        window.device = tensors_in(call.arguments)[0].device
        counted = operations.get_flop_counts()["Global"]
        window.operations += operations_of_a_step(call.module, counted, call.args, call.kwargs)
        return output

    def _with_options(self, window: Window, call: BlockCall, choices: Choices) -> Any:
        """Run a block with a choice, saving the least, after counting what its options save."""
        inputs, key = storages_in(call.arguments), call.key
        if key in window.calls:
            window.calls[key].times += 1
            return call.run(choices, inside=True)
        if choices.is_whole:
            results: list[Result] = []
            saved_apart(window, call, lambda: results.extend(counted(call.own_forward, COUNTED)))
            options = options_of_whole(results, least_inner(tensors_in(call.arguments)))
        else:
            options = options_of(call.module, call.args, call.kwargs, compute_dtype(call.arguments).itemsize)
        full = max(options, key=lambda option: option.saved_bytes)

        def saving(keeps: Keeps) -> int:
            given = replace(choices, recomputes=False, keeps=keeps)
            return saved_apart(window, call, lambda: call.run(given, inside=True)).bytes_beside(inputs)

        empty = saving(Keeps())
        if full.keeps is not None and full.saved_bytes:  # softmax tensors differ between devices
            missing = max(0, saving(full.keeps) - empty - full.saved_bytes)
            options = [o if o.keeps is None or not o.saved_bytes else o._replace(saved_bytes=o.saved_bytes + missing)
                       for o in options]  # fmt: skip
        before = window.count.bytes_beside(inputs)
        output = call.run(choices, inside=True)
        window.calls[key] = Call(options, window.count.bytes_beside(inputs) - before, empty)
        return output


def roots_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are called from outside: a plain model, or the parts of a LightningModule or a container."""
    if not isinstance(model, (LightningModule, nn.ModuleList, nn.ModuleDict)):
        if any(CHOICES in module.__dict__ for module in model.modules()):
            yield model
        return
    for child in model.children():
        yield from roots_of(child)
