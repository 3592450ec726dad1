"""Convolution and linear layer with a frozen weight, as ops that save only the input's shape.

Native autograd saves a convolution's input even if the weight is frozen, and under autocast a half-precision copy of
every frozen weight. These ops save neither; backward reads the weight itself. Convolution and matrix product are
torch's on cpu, cuda and npu.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.convolution import (
    Geometry,
    check_conv2d,
    conv2d_output_shape,
    convolve,
    convolve_backward,
)
from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import (
    cast,
    cast_optional,
    compute_dtype,
    refuse_functorch,
    without_autocast,
    without_values,
)
from lightning_aigc_kernels.matmul import in_shape_of, linear, matmul, rows_of


def frozen_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    *,
    skip_product: bool = False,
) -> Tensor:
    """conv2d(x, weight, bias) that saves nothing of x's size and gives only x's gradient.

    Args: x [N, C, H, W]; weight [D, C / groups, KH, KW]; cast to autocast's dtype if it is enabled. `skip_product`
        returns meaningless values, for a recomputed forward whose output is not read.
    Raises: ValueError if weight or bias require a gradient; RuntimeError under torch.func.
    """
    refuse_functorch("frozen_conv2d")
    _check_frozen("frozen_conv2d", weight, bias)
    check_conv2d("frozen_conv2d", x, weight, groups)
    dtype = _dtype_under(x, weight)
    with without_autocast(x):
        y: Tensor = _call_conv2d(
            x, weight, bias, list(stride), list(padding), list(dilation), groups, dtype, skip_product
        )
    return y


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(x, weight, bias) that saves only the weight, not autocast's copy of it.

    Args: x [..., C]; weight [D, C].
    Raises: ValueError if weight or bias require a gradient; RuntimeError under torch.func.
    """
    refuse_functorch("frozen_linear")
    _check_frozen("frozen_linear", weight, bias)
    dtype = _dtype_under(x, weight)
    with without_autocast(x):
        y: Tensor = _call_linear(x, weight, bias, dtype)
    return y


def _check_frozen(op: str, weight: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{op} gives no gradient of {name}, which requires one; freeze it or use torch's op")


def _dtype_under(x: Tensor, weight: Tensor) -> torch.dtype:
    """Autocast's dtype; without autocast x's dtype, which must equal the weight's, as in torch."""
    dtype = compute_dtype(x)
    if not torch.is_autocast_enabled(x.device.type) and weight.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and the weight {weight.dtype}; use one dtype or autocast")
    return dtype


# Convolution --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("lightning_aigc::frozen_conv2d", mutates_args=())
def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
    skip_product: bool,
) -> Tensor:
    geometry = Geometry(stride, padding, dilation, groups)
    if skip_product:
        return without_values(x, conv2d_output_shape(x.shape, weight.shape, geometry), dtype)
    return convolve(x, weight, bias, geometry, dtype)


@torch.library.custom_op("lightning_aigc::frozen_conv2d_backward", mutates_args=())
def _conv2d_backward(
    dy: Tensor,
    weight: Tensor,
    input_shape: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
) -> Tensor:
    geometry = Geometry(stride, padding, dilation, groups)
    return cast(convolve_backward(dy, input_shape, weight, geometry, need_weight=False, need_bias=False)[0], dtype)


_conv2d.register_fake(_conv2d._init_fn)
_conv2d_backward.register_fake(_conv2d_backward._init_fn)


def _setup_conv2d(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, *ctx.geometry, _, _ = inputs
    ctx.input_shape, ctx.input_dtype = x.shape, x.dtype
    ctx.save_for_backward(weight)


def _conv2d_autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (weight,) = ctx.saved_tensors
    return _call_conv2d_backward(dy, weight, list(ctx.input_shape), *ctx.geometry, ctx.input_dtype), *(None,) * 8


_call_conv2d, _call_conv2d_backward = register_autograd(_conv2d, _conv2d_backward, _setup_conv2d, _conv2d_autograd)


# Linear layer -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("lightning_aigc::frozen_linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = linear(rows_of(cast(x, dtype)), cast(weight, dtype), cast_optional(bias, dtype))
    return in_shape_of(x, y)


@torch.library.custom_op("lightning_aigc::frozen_linear_backward", mutates_args=())
def _linear_backward(dy: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(matmul(dy, cast(weight, dy.dtype)), dtype)


@_linear.register_fake
def _(x, weight, bias, dtype):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@_linear_backward.register_fake
def _(dy, weight, dtype):  # type: ignore[no-untyped-def]
    return dy.new_empty((*dy.shape[:-1], weight.shape[1]), dtype=dtype)


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, _ = inputs
    ctx.input_dtype = x.dtype
    ctx.save_for_backward(weight)


def _linear_autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (weight,) = ctx.saved_tensors
    return _call_linear_backward(dy, weight, ctx.input_dtype), None, None, None


_call_linear, _call_linear_backward = register_autograd(_linear, _linear_backward, _setup_linear, _linear_autograd)
