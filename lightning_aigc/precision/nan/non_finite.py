"""Find the module that first computed a non-finite value or gradient."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules import module as module_hooks
from torch.utils._pytree import tree_leaves

from lightning_aigc.sharding.local_parts import original_class


@dataclass(frozen=True)
class NonFinite:
    """The origin of the first non-finite value."""

    phase: Literal["forward", "input", "between", "loss", "backward"]
    """forward: the module computed it from finite inputs; input: the first module received it; between: code of a
    forward or of `training_step` computed it and passed it to the module; loss: computed after all modules; backward:
    computed from finite incoming gradients."""

    module: str
    """The module's name and class; empty if the phase is loss."""
    after: str = ""
    """For code between two modules: the module called before; empty if `module` is called first."""
    inside: str = ""
    """For code between modules: the module whose forward holds it; empty for `training_step`."""
    last_finite: str = ""
    """For between: the innermost module that ran last with finite output."""

    def place(self) -> str:
        """The module's name without its class, or `between X and Y`; empty if there is no module."""
        if self.after:
            return f"between {bare_name(self.after)} and {bare_name(self.module)}"
        return bare_name(self.inside or self.module)

    def sentence(self) -> str:
        """The event as one clause of text."""
        if self.phase == "forward":
            return f"{self.module} computed values in its forward pass that are not finite"
        if self.phase == "input":
            return f"{self.module} was given values that are not finite, by the batch or by code between modules"
        if self.phase == "loss":
            return "the loss is not finite, though what every module computed is"
        code = f"the forward of {self.inside}" if self.inside else "training_step"
        if self.phase == "backward":
            where = f"code in {code}, {self.place()}," if self.after else self.module
            return f"the backward pass of {where} computed a gradient that is not finite"
        place = self.place() if self.after else f"before {bare_name(self.module)}"
        last = f"; the last module whose output was finite is {self.last_finite}" if self.last_finite else ""
        return f"code in {code}, {place}, made values that are not finite{last}"


def bare_name(module: str) -> str:
    """A module's name without its class."""
    return module.split(" (")[0]


def first_non_finite(model: nn.Module, loss_of_batch: Callable[[], Tensor | None], scale: float) -> NonFinite | None:
    """Run forward and backward once under hooks, and return the first non-finite place, None if all is finite.

    Forward is checked per module, backward per operator. An operator belongs to the innermost module during whose
    forward it was recorded, so a block whose forward is one fused operator is named as one module. No gradient is
    accumulated, and no parameter hook runs, including DistributedDataParallel's.

    Args:
        model: The root of the module names.
        loss_of_batch: Returns the loss with its graph, or None if the step has no loss.
        scale: The loss scale at which gradients overflowed.
    """
    calls = _Calls(model)
    with calls.watched():
        loss = loss_of_batch()
    if loss is None or not loss.requires_grad:
        return None
    # A non-finite value counts only if it reaches the loss: an attention mask holds -inf on purpose.
    if not _is_finite(loss):
        return calls.first or NonFinite("loss", "")
    # A tensor, as in GradScaler: a float would leave a float16 loss in float16.
    return _first_in_backward(model, loss * torch.tensor(scale, device=loss.device), calls)


def non_finite_parameters(model: nn.Module) -> list[str]:
    """Names of parameters with non-finite gradients, the nearest to the output first."""
    names = [name for name, p in model.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
    return names[::-1]


@dataclass
class _Call:
    """A running module call."""

    name: str
    start: int
    """Sequence number of the first operator that the call may record."""
    is_given_finite: bool
    after: str
    """The module that the calling code called before."""
    last_finite: str
    """The last innermost module with finite output before this call."""
    last_child: str = ""
    holds_first: bool = False
    """Whether the first non-finite value occurred during this call."""


class _Calls:
    """Records every module call of one forward: its operators, and the first non-finite output."""

    def __init__(self, model: nn.Module) -> None:
        self.first: NonFinite | None = None
        # A compiled module wraps the user's module.
        self._names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self._running: list[_Call] = []
        self._outermost = _Call("", 0, True, "", "")  # training_step
        self._last_finite = ""
        self._first_given = ""  # the innermost module that received the batch's values
        self._spans: list[tuple[int, int, str]] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        # Global hooks also see frozen parts outside the module tree.
        handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, with_kwargs=True),
        ]
        try:
            with warnings.catch_warnings():
                # On purpose: the hooks see the compiled module and the module inside it.
                warnings.filterwarnings("ignore", ".*when there are global hooks.*")
                yield
        finally:
            for handle in handles:
                handle.remove()
                # torch 2.13 does not remove this entry, which would slow every later module call.
                module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)

    def place_of(self, node: Node) -> NonFinite:
        """The innermost module whose forward recorded this operator, or the two modules between which its code did."""
        at = node._sequence_nr()
        around = [span for span in self._spans if span[0] <= at < span[1]]
        # Among equal spans the innermost comes first.
        start, end, name = min(around, key=lambda span: span[1] - span[0], default=(0, 2**63, ""))
        within = [span for span in self._spans if start <= span[0] and span[1] <= end]
        before = max((s for s in within if s[1] <= at), key=lambda s: (s[1], -s[0]), default=None)
        behind = min((s for s in within if s[0] > at), key=lambda s: (s[0], -s[1]), default=None)
        if before is not None and behind is not None:
            return NonFinite("backward", behind[2], after=before[2], inside=name)
        return NonFinite("backward", name or "code outside the modules (the loss, for one)")

    def _caller(self) -> _Call:
        return self._running[-1] if self._running else self._outermost

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = f"{self._names.get(module) or 'the model'} ({original_class(module).__name__})"
        after = self._caller().last_child
        start = torch._C._autograd._get_sequence_nr()
        self._running.append(_Call(name, start, _all_finite(tree_leaves(args)), after, self._last_finite))

    def _leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        call = self._running.pop()
        self._spans.append((call.start, torch._C._autograd._get_sequence_nr(), call.name))
        if self.first is not None:
            # A module's non-finite input is traced to the inputs of the modules around it.
            if call.holds_first and self.first.phase in ("input", "between") and not _is_given_finite(call, kwargs):
                self.first = self._given(call)
        elif not _all_finite(tree_leaves(output)):
            has_finite_input = _is_given_finite(call, kwargs)
            self._first_given = call.name
            self.first = NonFinite("forward", call.name) if has_finite_input else self._given(call)
            for around in self._running:
                around.holds_first = True
        else:
            if not call.last_child:
                self._last_finite = call.name
            self._caller().last_child = call.name

    def _given(self, call: _Call) -> NonFinite:
        """The origin of a non-finite value that a module received from its caller."""
        inside = self._caller().name
        if not inside and not call.after:
            return NonFinite("input", self._first_given)
        return NonFinite("between", call.name, after=call.after, inside=inside, last_finite=call.last_finite)


def _is_given_finite(call: _Call, kwargs: dict[str, Any]) -> bool:
    by_name = {key: value for key, value in kwargs.items() if "mask" not in key}
    return call.is_given_finite and _all_finite(tree_leaves(by_name))


def _first_in_backward(model: nn.Module, loss: Tensor, calls: _Calls) -> NonFinite | None:
    origins: list[NonFinite] = []

    def watch(node: Node) -> None:
        def after(outgoing: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
            # The first in time, so its incoming gradients were finite.
            if not origins and not _all_finite(outgoing):
                origins.append(calls.place_of(node))

        node.register_hook(after)

    for node in _nodes(loss):
        watch(node)
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss, trained, allow_unused=True)
    return origins[0] if origins else None


def _nodes(loss: Tensor) -> Iterator[Node]:
    """Yield every operator in the autograd graph of a loss."""
    waiting = [loss.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]


def _all_finite(values: Sequence[Any]) -> bool:
    tensors = (v for v in values if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()))
    return all(_is_finite(tensor) or _is_additive_mask(tensor) for tensor in tensors)


def _is_finite(tensor: Tensor) -> bool:
    values = tensor.detach()
    return bool(torch.isfinite(values._values() if values.is_sparse else values).all())


def _is_additive_mask(tensor: Tensor) -> bool:
    """Whether the tensor holds only zeros and minus infinity, as an additive mask does on purpose."""
    if tensor.is_complex() or tensor.is_sparse:
        return False
    is_zero = tensor.detach() == 0
    return bool(is_zero.any()) and bool((is_zero | (tensor.detach() == -torch.inf)).all())
