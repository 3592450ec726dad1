"""Plan what each swapped block saves for backward, within a budget of bytes.

A plan covers one forward call of a top-level module, for one set of input shapes. The first call with these shapes
saves the least: each block runs up to three more times in it, natively and fused, to count the bytes that it would
save. The plan for later calls is computed from these counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from lightning_aigc._lightning import LightningModule, rank_zero_info
from lightning_aigc.errors import ConfigError
from lightning_aigc.knapsack import choose
from lightning_aigc.precision.block_options import BlockOptions, SavedParts
from lightning_aigc.precision.context import count_saved, current, options_of, saved_by_child
from lightning_aigc.precision.memory import profile as profiles
from lightning_aigc.precision.memory import recompute, save_options
from lightning_aigc.precision.memory.block_call import BlockCall, compute_dtype, saved_by, signature_of
from lightning_aigc.precision.memory.budget import MemoryBudget
from lightning_aigc.precision.memory.footprint import available_bytes, bytes_without_activations, int8_savings
from lightning_aigc.precision.memory.profile import BlockProfile, ForwardProfile, Plan, Result, Signature
from lightning_aigc.precision.memory.save_options import EVERYTHING
from lightning_aigc.precision.memory.saved_tensors import (
    is_checkpointed,
    is_in_backward,
    owned_by,
    storages_in,
    tensors_in,
)
from lightning_aigc.precision.memory.selective import count_operations, min_inner_dim
from lightning_aigc_kernels.dispatch import refuse_functorch

ADVICE_SHARE = 0.01
"""Share of a step's operations from which the plan reports the operations that an int8 base would save."""


class Planner:
    """Chooses what the swapped blocks of one model save, for each forward call of its top-level modules."""

    def __init__(self, budget: MemoryBudget, model: nn.Module) -> None:
        self.budget = budget
        self.model = model
        self.optimizers: Sequence[Optimizer] = ()
        self.plans: dict[Signature, Plan] = {}
        self._without_plan: set[Signature] = set()
        self._handles: list[Any] = []
        self.line = ""
        """Description of the first plan."""

    def __deepcopy__(self, memo: object) -> Planner:
        return self  # a copy of the model plans with its original

    def watch(self, root: nn.Module) -> None:
        """Plan the calls of a top-level module that contains swapped blocks."""
        opened: list[ForwardProfile | None] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            profile = self._open(module, args, kwargs)
            opened.append(profile)

        def after(module: nn.Module, args: Any, kwargs: Any, output: object) -> None:
            profile = opened.pop() if opened else None
            if profile is not None:
                self._close(module, args, kwargs, profile, failed=output is None)

        self._handles.append(root.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(root.register_forward_hook(after, with_kwargs=True, always_call=True))

    def remove(self) -> None:
        """Stop planning."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _open(self, root: nn.Module, args: Any, kwargs: Any) -> ForwardProfile | None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_checkpointed():
            return None
        if current.profile is not None or current.runs_natively:
            return None
        signature = signature_of(root, args, kwargs)
        if signature in self._without_plan:
            return None
        plan = self.plans.get(signature)
        if plan is not None:
            profile = ForwardProfile(plan.options)
        else:
            refuse_functorch("memory_budget")
            profile = ForwardProfile(None, owned=owned_by(root))
            profile.count = profile.scope.enter_context(count_saved(profile.owned))
        current.profile = profile
        return profile

    def _close(self, root: nn.Module, args: Any, kwargs: Any, profile: ForwardProfile, failed: bool) -> None:
        current.profile = None
        if profile.planned is not None:
            return
        profile.scope.close()
        if not failed and not profile.blocks:  # compiled, or no block with save options: nothing to profile
            self._without_plan.add(signature_of(root, args, kwargs))
        if not failed and profile.blocks:
            plan = self._plan(profile)
            self.plans[signature_of(root, args, kwargs)] = plan
            if not self.line:
                self.line = plan.summary(self.budget)
                rank_zero_info(self.line)

    def _plan(self, profile: ForwardProfile) -> Plan:
        """Compute the plan for calls like the profiled one.

        Raises: ConfigError if the first plan cannot meet the budget.
        """
        keys, costs = list(profile.blocks), [block.costs() for block in profile.blocks.values()]
        inside_now = sum(block.times * block.least for block in profile.blocks.values())
        fixed, native = profile.saved - inside_now, profile.native
        least = fixed + sum(min(n for n, _ in block) for block in costs)
        has_share = self.budget.kept is not None
        other_bytes = 0 if has_share else self._other_bytes(profile)
        int8_saves = 0 if has_share else int8_savings(self.model)
        allowed = self._allowed(profile, native, other_bytes) - fixed
        picks = choose(costs, allowed)
        if picks is None:
            if not self.plans:
                raise ConfigError(self.budget.too_small_message(least, native, other_bytes, int8_saves))
            picks = [min(range(len(block)), key=lambda i: block[i]) for block in costs]
        planned: dict[object, BlockOptions] = {}
        recomputed = 0
        for key, pick in zip(keys, picks, strict=True):
            saved = profile.blocks[key].options[pick].saved
            recomputed += saved is None
            if saved is not None:
                planned[key] = replace(options_of(key[0]), saved=saved, recomputes=False)
        kept = fixed + sum(block[pick][0] for block, pick in zip(costs, picks, strict=True))
        repeated = sum(block[pick][1] for block, pick in zip(costs, picks, strict=True))
        with_int8 = None
        int8_picks = choose(costs, allowed + int8_saves) if int8_saves else None
        if int8_picks is not None:
            fewer = sum(block[pick][1] for block, pick in zip(costs, int8_picks, strict=True))
            with_int8 = (int8_saves, fewer) if repeated - fewer >= ADVICE_SHARE * profile.operations else None
        return Plan(planned, kept, native, least, repeated, profile.operations, recomputed, len(keys), with_int8)

    def _other_bytes(self, profile: ForwardProfile) -> int:
        """Return the bytes of a step's peak that are not saved activations."""
        fixed = bytes_without_activations(self.model, self.optimizers, profile.device, profile.saved)
        return fixed + profile.largest

    def _allowed(self, profile: ForwardProfile, native: int, other_bytes: int) -> float:
        """Return the bytes that may be saved."""
        if self.budget.kept is not None:
            return self.budget.kept * native
        if self.budget.peak_gb is not None:
            return self.budget.peak_gb * 2**30 - other_bytes
        return available_bytes(profile.device, self.model) - other_bytes

    def call(self, module: Any, options: BlockOptions, fused: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a swapped module's forward with the options planned for this call."""
        call = BlockCall(module, fused, args, kwargs)
        if current.runs_natively:
            return call.run_class_forward()
        chosen_outside = saved_by_child(module)
        if chosen_outside is not None:
            return call.run(replace(options, saved=chosen_outside))
        if current.is_inside_block or recompute.is_inside():
            return call.run(options)
        profile = current.profile
        if profile is not None and profile.planned is None and current.is_outermost and not is_in_backward():
            return self._profile_outermost(profile, call, options)
        return self._run_with_plan(profile, call, options)

    def _run_with_plan(self, profile: ForwardProfile | None, call: BlockCall, options: BlockOptions) -> Any:
        if not save_options.exist_for(call.module):
            return call.run(options)
        if is_checkpointed():
            # Tensors saved in a region of torch.utils.checkpoint live shortly: nothing is computed a third time.
            options = replace(options, recomputes=False, saved=EVERYTHING)
        elif profile is not None and profile.planned is not None:
            options = profile.planned.get(call.key, options)
        elif profile is not None:
            return self._profile_block(profile, call, options)
        return call.run(options, is_planned=True)

    def _profile_outermost(self, profile: ForwardProfile, call: BlockCall, options: BlockOptions) -> Any:
        """Run an outermost swapped module, after its class's forward was profiled."""
        inputs = storages_in(call.arguments)
        contiguous, originals = call.made_contiguous()
        with FlopCounterMode(display=False, custom_mapping=profiles.COUNTED) as operations:
            natively = saved_by(profile, call, contiguous.run_natively)
        if is_checkpointed():
            profile.count.storages.update({a: s for a, s in inputs.items() if a not in profile.owned})
        before = profile.count.total(without=inputs)
        current.is_outermost = False
        try:
            output = self._run_with_plan(profile, call, options)
        finally:
            current.is_outermost = True
        inside = natively.total(without=inputs.keys() | originals)
        profile.native_inside += inside - (profile.count.total(without=inputs) - before)
        saved_inputs = {originals.get(address, address) for address in natively.storages}
        profile.native_inputs |= {a: s for a, s in inputs.items() if a in saved_inputs and a not in profile.owned}
        profile.largest = max(profile.largest, inside)
        profile.device = tensors_in(call.arguments)[0].device
        counted = operations.get_flop_counts()["Global"]
        profile.operations += profiles.operations_of_a_step(call.module, counted, call.args, call.kwargs)
        return output

    def _profile_block(self, profile: ForwardProfile, call: BlockCall, options: BlockOptions) -> Any:
        """Run a block that has save options, saving the least, after counting the bytes that its options save."""
        inputs, key = storages_in(call.arguments), call.key
        if key in profile.blocks:
            profile.blocks[key].times += 1
            return call.run(options, is_planned=True)
        if options.is_checkpointed_block:
            results: list[Result] = []
            saved_by(profile, call, lambda: results.extend(count_operations(call.run_class_forward, profiles.COUNTED)))
            choices = save_options.of_checkpointed_block(results, min_inner_dim(tensors_in(call.arguments)))
        else:
            choices = save_options.of_block(call.module, call.args, call.kwargs, compute_dtype(call.arguments).itemsize)
        full = max(choices, key=lambda option: option.saved_bytes)

        def bytes_of(saved: SavedParts) -> int:
            with_saved = replace(options, recomputes=False, saved=saved)
            return saved_by(profile, call, lambda: call.run(with_saved, is_planned=True)).total(without=inputs)

        empty = bytes_of(SavedParts())
        if full.saved is not None and full.saved_bytes:  # softmax tensors differ between devices
            missing = max(0, bytes_of(full.saved) - empty - full.saved_bytes)
            choices = [
                option._replace(saved_bytes=option.saved_bytes + missing)
                if option.saved is not None and option.saved_bytes
                else option
                for option in choices
            ]
        before = profile.count.total(without=inputs)
        output = call.run(options, is_planned=True)
        profile.blocks[key] = BlockProfile(choices, profile.count.total(without=inputs) - before, empty)
        return output


def roots_of(model: nn.Module, swapped: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules with swapped blocks that code outside calls: a plain model, or a container's children."""
    if not isinstance(model, (LightningModule, nn.ModuleList, nn.ModuleDict)):
        if any(module in swapped for module in model.modules()):
            yield model
        return
    for child in model.children():
        yield from roots_of(child, swapped)
