"""What every op asks at its door: the dtype to compute in, who computes, and whether it may be called at all."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import types
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

KERNEL_DEVICES = ("cuda", "npu")
HALF_DTYPES = (torch.float16, torch.bfloat16)
KERNEL_DTYPES = (torch.float32, *HALF_DTYPES)


class FallbackWarning(UserWarning):
    """A fast kernel could not serve an input; the reference did."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that an op's products run in: autocast's on x's device when that is on, else x's own."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def backward_dtype(asked: torch.dtype | None, forward: torch.dtype) -> torch.dtype:
    """The dtype of backward's products: what was asked for, but half precision only where forward ran in it too.

    A forward in float32 has no half precision products to trade, and its softmax statistics fit its own kernel alone.
    """
    if asked is None or (asked in HALF_DTYPES and forward not in HALF_DTYPES):
        return forward
    return asked


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Within: the dtypes that an op chose stand, autocast or not."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def refuse_functorch(op: str) -> None:
    """Raises: RuntimeError inside torch.func's grad, vmap, jvp and their like, which these ops have no rules for.

    Forward-mode autograd counts among them: a custom op would drop the tangent without a word.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        raise RuntimeError(
            f"lightning_aigc::{op} has no torch.func rules (grad, vmap, jvp), got a call inside one; "
            "use torch.autograd, or memory='off' to train this model with its own forward"
        )


def no_second_derivative(op: str) -> Callable[..., None]:
    """The backward of an op's backward: RuntimeError, with the op's name and the way out."""

    def refuse(*_: object) -> None:
        raise RuntimeError(
            f"lightning_aigc::{op} has no second derivative, got a backward pass through its gradient; "
            "use memory='off' where a loss contains gradients (create_graph=True)"
        )

    return refuse


def direct(op: Any, setup_context: Callable[..., None], autograd: Callable[..., Any]) -> Callable[..., Any]:
    """A custom op's implementation under an autograd.Function of its own, and the op itself wherever something traces.

    torch.library's way to the same autograd formula fills in defaults and walks the arguments in Python: 0.25 of the
    0.38 milliseconds that an op of 31 arguments took (torch 2.13), which a GPU would wait for. An autograd.Function
    with a `setup_context` does so too (inspect.signature at every call), so forward calls it itself.
    """
    implementation = op._init_fn

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            result = implementation(*args)
            setup_context(ctx, args, result)
            return tuple(result) if isinstance(result, list) else result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return autograd(ctx, list(grads)) if gives_list else autograd(ctx, *grads)

    named: Any = types.new_class(op._name, (Direct,))  # autograd's errors name the op
    gives_list = str(op._opoverload._schema.returns[0].type) == "List[Tensor]"

    def call(*args: Any) -> Any:
        return op(*args) if is_traced() else named.apply(*args)

    return call


def direct_backward(op: Any) -> Callable[..., Any]:
    """The op of a backward pass: its implementation, or the op itself where something traces or derives it again."""
    implementation = op._init_fn

    def call(*args: Any) -> Any:
        return op(*args) if torch.is_grad_enabled() or is_traced() else implementation(*args)

    return call


def is_traced() -> bool:
    """Whether torch.compile or a dispatch mode looks at every operator, and so wants ops whole."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())


def without_values(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape in one number's memory, for a result that nobody will read."""
    return like.new_empty((), dtype=dtype).expand(tuple(shape))


def check_density(density: float, of: str) -> None:
    """Raises: ValueError for a share of kept entries outside (0, 1]."""
    if not 0 < density <= 1:
        raise ValueError(f"{of} must be in (0, 1], got {density}; use 1 to keep every entry")


def kernel_for(op: str, x: Tensor) -> ModuleType | None:
    """`<op>/kernel.py` when it serves x's device and dtype, else None: the reference does. Says once why not."""
    if x.device.type not in KERNEL_DEVICES:
        return None
    reason = why_no_kernel(op)
    if reason is None and x.dtype not in KERNEL_DTYPES:
        reason = f"it computes in float32 and got {x.dtype}"
    if reason is not None:
        say_once(op, x.device.type, f"its Triton kernel cannot: {reason}")
        return None
    return _kernel_module(op)


@functools.cache
def why_no_kernel(op: str) -> str | None:
    """Why `<op>/kernel.py` cannot be used here, None when it can."""
    if importlib.util.find_spec(f"lightning_aigc_kernels.{op}.kernel") is None:
        return "it has none"
    try:
        _kernel_module(op)
    except Exception as error:  # a Triton of the other vendor breaks in its own ways
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    return None


def _kernel_module(op: str) -> ModuleType:
    return importlib.import_module(f"lightning_aigc_kernels.{op}.kernel")


@functools.cache
def say_once(op: str, device: str, reason: str) -> None:
    """Warn that an op is slower, or takes more memory, than it could be on this device."""
    message = f"lightning_aigc::{op} runs its plain torch reference on {device}; {reason}"
    warnings.warn(message, FallbackWarning, stacklevel=3)
