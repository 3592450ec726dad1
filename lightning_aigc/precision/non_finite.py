"""Find the module that first made a value or a gradient that is not finite."""

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


@dataclass(frozen=True)
class NonFinite:
    """Where the first value that is not finite came from."""

    phase: Literal["forward", "input", "loss", "backward"]
    """forward: the module made it of finite inputs; input: the module was given it; loss: made after every module;
    backward: made of finite incoming gradients."""

    module: str
    """The module's name and class; empty where the phase is loss."""

    def sentence(self) -> str:
        if self.phase == "forward":
            return f"{self.module} computed values in its forward pass that are not finite"
        if self.phase == "input":
            return f"{self.module} was given values that are not finite, by the batch or by code between modules"
        if self.phase == "loss":
            return "the loss is not finite, though what every module computed is"
        return f"the backward pass of {self.module} computed a gradient that is not finite"


def first_non_finite(model: nn.Module, loss_of_batch: Callable[[], Tensor | None], scale: float) -> NonFinite | None:
    """Run forward and backward once, watching, and return the first place where a value is not finite.

    Forward is watched module by module, backward operator by operator: an operator belongs to the innermost module
    during whose forward it was recorded, so blocks whose forward is one fused operator are named as a whole.
    No gradient is left behind, and no hook of a parameter runs, DistributedDataParallel's included.

    Args:
        model: Names its modules.
        loss_of_batch: Makes the loss with its graph; None where the step made none.
        scale: The loss scale at which gradients overflowed.

    Returns: None if everything was finite.
    """
    calls = _Calls(model)
    with calls.watched():
        loss = loss_of_batch()
    if loss is None or not loss.requires_grad:
        return None
    # A value that is not finite counts only where it reaches the loss: an attention mask holds -inf on purpose.
    if not _is_finite(loss):
        return calls.first or NonFinite("loss", "")
    # A tensor, as in GradScaler: a float would leave a float16 loss in float16.
    return _first_in_backward(model, loss * torch.tensor(scale, device=loss.device), calls)


def non_finite_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradients are not finite, the one nearest to the output first."""
    names = [name for name, p in model.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
    return names[::-1]


class _Calls:
    """Every module call of one forward: the operators recorded in it, and the first output that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.first: NonFinite | None = None
        # A compiled module wraps the one that the user knows.
        self._names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self._starts: list[int] = []
        self._spans: list[tuple[int, int, str]] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        # Global hooks: a frozen part that is kept out of the module tree is seen too.
        handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, with_kwargs=True),
        ]
        try:
            with warnings.catch_warnings():
                # Wanted here: the hooks see the compiled module and the one inside it.
                warnings.filterwarnings("ignore", ".*when there are global hooks.*")
                yield
        finally:
            for handle in handles:
                handle.remove()
                # torch 2.13 forgets this one, and every later call of any module would be slower.
                module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)

    def owner(self, node: Node) -> str:
        """The innermost module whose forward recorded this operator."""
        at = node._sequence_nr()
        inside = [span for span in self._spans if span[0] <= at < span[1]]
        # Of equal spans the innermost was left first.
        return (
            min(inside, key=lambda span: span[1] - span[0])[2]
            if inside
            else "code outside the modules (the loss, for one)"
        )

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())

    def _leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        name = f"{self._names.get(module) or 'the model'} ({type(module).__name__})"
        self._spans.append((self._starts.pop(), torch._C._autograd._get_sequence_nr(), name))
        if self.first is None and not _all_finite(tree_leaves(output)):
            given = [args, {key: value for key, value in kwargs.items() if "mask" not in key}]
            self.first = NonFinite("forward" if _all_finite(tree_leaves(given)) else "input", name)


def _first_in_backward(model: nn.Module, loss: Tensor, calls: _Calls) -> NonFinite | None:
    found: list[NonFinite] = []

    def watch(node: Node) -> None:
        def after(outgoing: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
            # The first in time: whatever came into it was finite.
            if not found and not _all_finite(outgoing):
                found.append(NonFinite("backward", calls.owner(node)))

        node.register_hook(after)

    for node in _nodes(loss):
        watch(node)
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss, trained, allow_unused=True)
    return found[0] if found else None


def _nodes(loss: Tensor) -> Iterator[Node]:
    """Every operator in the graph behind a loss."""
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
    return all(_is_finite(v) for v in values if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()))


def _is_finite(tensor: Tensor) -> bool:
    values = tensor.detach()
    return bool(torch.isfinite(values._values() if values.is_sparse else values).all())
