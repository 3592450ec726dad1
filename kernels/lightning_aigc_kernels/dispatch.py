"""Which dtype an op computes in, which kernel or reference runs it, and which calls it refuses."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

KERNEL_DEVICES = ("cuda", "npu")
HALF_DTYPES = (torch.float16, torch.bfloat16)
KERNEL_DTYPES = (torch.float32, *HALF_DTYPES)


class FallbackWarning(UserWarning):
    """A fast kernel could not serve an input; the reference did."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of an op's products: autocast's on x's device where that is on, else x's."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def backward_dtype(asked: torch.dtype | None, forward: torch.dtype) -> torch.dtype:
    """Return the dtype of backward's products: what was asked for, but half precision only after a half forward.

    A forward in float32 has no half precision products to trade, and its softmax statistics fit its own kernel alone.
    """
    if asked is None or (asked in HALF_DTYPES and forward not in HALF_DTYPES):
        return forward
    return asked


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Turn autocast off on x's device, so that the dtypes which an op chose stand."""
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


def without_values(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape in the memory of one number, for a result whose values are never read."""
    return like.new_empty((), dtype=dtype).expand(tuple(shape))


def check_density(density: float, of: str) -> None:
    """Raises: ValueError for a share of kept entries outside (0, 1]."""
    if not 0 < density <= 1:
        raise ValueError(f"{of} must be in (0, 1], got {density}; use 1 to keep every entry")


def kernel_for(op: str, x: Tensor) -> ModuleType | None:
    """Return `<op>/kernel.py` if it serves x's device and dtype, else None, for the reference; warn once why not."""
    if x.device.type not in KERNEL_DEVICES:
        return None
    reason = why_no_kernel(op)
    if reason is None and x.dtype not in KERNEL_DTYPES:
        reason = f"it computes in float32 and got {x.dtype}"
    if reason is not None:
        warn_once(op, x.device.type, f"its Triton kernel cannot: {reason}")
        return None
    return _kernel_module(op)


@functools.cache
def why_no_kernel(op: str) -> str | None:
    """Return why `<op>/kernel.py` cannot be used here, None if it can."""
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
def warn_once(op: str, device: str, reason: str) -> None:
    """Warn that an op is slower, or takes more memory, than it could on this device."""
    message = f"lightning_aigc::{op} runs its plain torch reference on {device}; {reason}"
    warnings.warn(message, FallbackWarning, stacklevel=3)
