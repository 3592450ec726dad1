"""Dispatch of an op: its compute dtype, its kernel or reference, and the calls it refuses."""

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
    """An input ran on the reference, because the fast kernel does not support it."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of an op's products: autocast's if it is enabled on x's device, else x's."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def backward_dtype(asked: torch.dtype | None, forward: torch.dtype) -> torch.dtype:
    """The dtype of backward's products: `asked`, but half precision only after a half-precision forward.

    A float32 forward gains nothing from it, and its softmax statistics fit only the float32 kernel.
    """
    if asked is None or (asked in HALF_DTYPES and forward not in HALF_DTYPES):
        return forward
    return asked


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Disable autocast on x's device, so that it does not change the dtypes that an op chose."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def refuse_functorch(op: str) -> None:
    """Raise RuntimeError inside torch.func transforms (grad, vmap, jvp), which these ops do not support.

    This includes forward-mode autograd, where a custom op would silently drop the tangent.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        raise RuntimeError(
            f"lightning_aigc::{op} has no torch.func rules (grad, vmap, jvp), got a call inside one; "
            "use torch.autograd, or memory: off to train this model with its unfused forward"
        )


def without_values(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape with the memory of one element, for a result whose values are never read."""
    return like.new_empty((), dtype=dtype).expand(tuple(shape))


def check_density(density: float, of: str) -> None:
    """Raise ValueError for a density outside (0, 1]."""
    if not 0 < density <= 1:
        raise ValueError(f"{of} must be in (0, 1], got {density}; use 1 to keep every entry")


def kernel_for(op: str, x: Tensor) -> ModuleType | None:
    """Return `<op>/kernel.py` if it supports x's device and dtype, else None, with a warning once on a device."""
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
def cpu_kernel_for(op: str) -> ModuleType | None:
    """Return `<op>/cpu_kernel.py`, which Numba compiles, else None, with a warning once that says what is missing."""
    try:
        return importlib.import_module(f"lightning_aigc_kernels.{op}.cpu_kernel")
    except Exception as error:  # a Numba that does not fit this NumPy or Python raises many types
        warn_once(op, "cpu", f"Numba cannot compile its kernel ({type(error).__name__}: {error}); pip install numba")
        return None


@functools.cache
def why_no_kernel(op: str) -> str | None:
    """The reason why `<op>/kernel.py` cannot be used here, None if it can."""
    if importlib.util.find_spec(f"lightning_aigc_kernels.{op}.kernel") is None:
        return "it has none"
    try:
        _kernel_module(op)
    except Exception as error:  # the other vendor's Triton may raise anything
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    return _why_no_driver()


def has_npu_ops(*names: str) -> bool:
    """Whether torch_npu registered these operators."""
    return all(hasattr(torch.ops.npu, name) for name in names)


def _why_no_driver() -> str | None:
    """The reason why Triton launches nothing here, such as that of another vendor's cards; None if it can."""
    try:
        from triton.runtime import driver
    except ImportError:  # a kernel that needs no Triton
        return None
    try:
        driver.active.get_current_target  # noqa: B018 - the first look makes the driver
    except Exception as error:  # vendors' drivers look for compilers and libraries when they are made
        return f"Triton has no driver for this machine's cards ({type(error).__name__}: {error})"
    return None


def _kernel_module(op: str) -> ModuleType:
    return importlib.import_module(f"lightning_aigc_kernels.{op}.kernel")


@functools.cache
def warn_once(op: str, device: str, reason: str) -> None:
    """Warn, once per reason, that an op runs its reference on this device, slower or with more memory."""
    message = f"lightning_aigc::{op} runs its plain torch reference on {device}; {reason}"
    warnings.warn(message, FallbackWarning, stacklevel=3)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in `dtype`, itself if it has it: comparing first takes a tenth of `Tensor.to`'s host time."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def cast_optional(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """As `cast`; None for None."""
    return None if tensor is None else cast(tensor, dtype)
