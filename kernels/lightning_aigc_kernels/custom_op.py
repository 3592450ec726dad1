"""Autograd for custom ops: torch.library's registration, and a call that bypasses its overhead outside traces."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

SetupContext = Callable[..., None]
Backward = Callable[..., Any]


def register_autograd(
    op: Any, backward_op: Any, setup_context: SetupContext, backward: Backward
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Register the autograd formula of `op`, and an error for a derivative of `backward_op`.

    Args: setup_context and backward as for torch.library's register_autograd.
    Returns: the functions that call the op and, in `backward`, its backward op; see `direct` and `direct_backward`.
    """
    backward_op.register_autograd(no_second_derivative(op._name.removeprefix("lightning_aigc::")))
    op.register_autograd(backward, setup_context=setup_context)
    return direct(op, setup_context, backward), direct_backward(backward_op)


def no_second_derivative(op: str) -> Callable[..., None]:
    """Return the autograd formula of an op's backward, which raises a RuntimeError with advice."""

    def refuse(*_: object) -> None:
        raise RuntimeError(
            f"lightning_aigc::{op} has no second derivative, got a backward pass through its gradient; "
            "use memory: off where a loss contains gradients (create_graph=True)"
        )

    return refuse


def direct(op: Any, setup_context: SetupContext, backward: Backward) -> Callable[..., Any]:
    """Wrap a custom op's implementation in an autograd.Function; under tracing, call the op itself.

    torch.library's dispatch to the same formula fills in defaults and walks the arguments in Python: 0.25 of the
    0.38 milliseconds of an op with 31 arguments (torch 2.13), for which a GPU would wait. An autograd.Function with a
    `setup_context` is slow too (inspect.signature at every call), so `forward` calls it directly.
    """
    implementation = op._init_fn
    schema = op._opoverload._schema
    gives_list = str(schema.returns[0].type) == "List[Tensor]"
    lists = [i for i, argument in enumerate(schema.arguments) if str(argument.type) == "List[Tensor]"]

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            result = implementation(*args)
            setup_context(ctx, args, result)
            return tuple(result) if isinstance(result, list) else result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, list(grads)) if gives_list else backward(ctx, *grads)

    class DirectWithLists(Direct):
        """Takes the lengths of the lists, then the arguments with each list replaced by its items."""

        @staticmethod
        def forward(ctx: Any, lengths: Sequence[int], *flat: Any) -> Any:
            ctx.lengths = lengths
            return Direct.forward(ctx, *_nest(flat, lists, lengths))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            needs = ctx.needs_input_grad
            ctx.needs_input_grad = _nest(needs[1:], lists, ctx.lengths)  # in torch.library's form
            try:
                gradients = Direct.backward(ctx, *grads)
            finally:
                ctx.needs_input_grad = needs
            return None, *_flatten(gradients, lists)

    named: Any = types.new_class(op._name, (DirectWithLists if lists else Direct,))  # autograd's errors name the op

    apply = super(torch.autograd.Function, named).apply  # without unwrap_dead_wrappers: functorch is refused before

    def call(*args: Any) -> Any:
        if not torch.compiler.is_compiling() and torch._C._len_torch_function_stack():  # modes see it, as torch's own
            return handle_torch_function(call, (), *args)
        if is_traced() and not is_ignored(op._qualname):
            return op(*args)
        if lists:
            return apply([len(args[i]) for i in lists], *_flatten(args, lists))
        return apply(*args)

    return call


def _flatten(args: Sequence[Any], lists: Sequence[int]) -> Sequence[Any]:
    """Replace list arguments by their items, because an autograd.Function does not see tensors in a list."""
    flat = list(args)
    for position in reversed(lists):
        flat[position : position + 1] = args[position]
    return flat


def _nest(flat: Sequence[Any], lists: Sequence[int], lengths: Sequence[int]) -> Sequence[Any]:
    """Undo `_flatten`."""
    args = list(flat)
    for position, length in zip(lists, lengths, strict=True):
        args[position : position + length] = [args[position : position + length]]
    return args


def direct_backward(op: Any) -> Callable[..., Any]:
    """Return a function that calls a backward op's implementation, or the op itself under tracing or grad mode."""
    implementation = op._init_fn

    def call(*args: Any) -> Any:
        return op(*args) if torch.is_grad_enabled() or is_traced() else implementation(*args)

    return call


def is_ignored(name: str) -> bool:
    """Whether every active dispatch mode has a method `ignores` that says that it need not see this op."""
    if torch.compiler.is_compiling():
        return False
    for mode in _get_current_dispatch_mode_stack():
        ignores = getattr(mode, "ignores", None)
        if ignores is None or not ignores(name):
            return False
    return True


def is_traced() -> bool:
    """Whether torch.compile or a dispatch mode intercepts operators, and so needs the registered op."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())
