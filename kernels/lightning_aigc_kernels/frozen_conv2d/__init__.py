"""Convolution and linear layer whose weight is frozen: nothing of the input is kept, only its shape.

Native autograd keeps a convolution's input whatever the weight needs, and under autocast a half-precision copy of every
frozen weight. Both are left out here: backward reads the weight itself. Convolution and matrix product are the device's
own on cpu, cuda and npu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_aigc_kernels.calling import (
    HALF_DTYPES,
    compute_dtype,
    direct,
    direct_backward,
    no_second_derivative,
    refuse_functorch,
    without_autocast,
    without_values,
)
from lightning_aigc_kernels.products import linear, matmul, needs_float32

__all__ = ["frozen_conv2d", "frozen_linear"]


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
    """conv2d(x, weight, bias) whose backward gives x's gradient and keeps nothing of x's size.

    Args: x [N, C, H, W]; weight [D, C / groups, KH, KW]; all in the dtype of autocast where that is on.
        `skip_product` returns numbers without meaning, for a forward pass repeated for what backward needs of it alone.
    Raises: ValueError when weight or bias require a gradient; RuntimeError under torch.func.
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
    """linear(x, weight, bias) that keeps the weight alone, not autocast's copy of it.

    Args: x [..., C]; weight [D, C].
    Raises: ValueError when weight or bias require a gradient; RuntimeError under torch.func.
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
            raise ValueError(f"{op} gives no gradient of {name}, which requires one; freeze it or use torch's own")


def check_conv2d(op: str, x: Tensor, weight: Tensor, groups: int) -> None:
    """Raises: ValueError for an input that a convolution with this weight cannot take."""
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1] * groups:
        wanted = f"x [N, C, H, W] and weight [D, C / {groups}, KH, KW]"
        raise ValueError(f"{op} wants {wanted}, got {tuple(x.shape)} and {tuple(weight.shape)}")


def _dtype_under(x: Tensor, weight: Tensor) -> torch.dtype:
    """Autocast's dtype; without autocast x's, which must then be the weight's, as for torch's own."""
    dtype = compute_dtype(x)
    if not torch.is_autocast_enabled(x.device.type) and weight.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and the weight {weight.dtype}; use one dtype or autocast")
    return dtype


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
    if skip_product:
        return without_values(x, conv2d_output_shape(x.shape, weight.shape, stride, padding, dilation), dtype)
    return convolve(x, weight, bias, stride, padding, dilation, groups, dtype)


_conv2d.register_fake(_conv2d._init_fn)


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
    geometry = stride, padding, dilation, groups
    return convolve_backward(dy, input_shape, weight, *geometry, need_weight=False, need_bias=False)[0].to(dtype)


_conv2d_backward.register_fake(_conv2d_backward._init_fn)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
) -> Tensor:
    """conv2d in `dtype`, in the memory layout that x's device takes best; no autograd."""
    x, weight, bias = lay_out(x.to(dtype), weight), weight.to(dtype), None if bias is None else bias.to(dtype)
    if needs_float32(x):
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups).to(dtype)


def convolve_backward(
    dy: Tensor,
    x: Tensor | Sequence[int],
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of a convolution's input, weight and bias, in dy's dtype; no autograd.

    Args: x is the input, or where the weight's gradient is not needed its shape alone.
    """
    dtype = dy.dtype
    dy, weight = lay_out(dy, weight), weight.to(dtype)
    if needs_float32(dy):
        dy, weight = dy.float(), weight.float()
    if isinstance(x, Tensor):
        x = lay_out(x.to(dtype), weight).to(dy.dtype)
    elif dy.device.type == "cpu":  # the input's values are never looked at; a CPU reads its layout alone
        x = torch.empty(tuple(x), dtype=dy.dtype, memory_format=_layout(x, weight, dtype))
    else:
        x = dy.new_empty(()).expand(tuple(x))
    mask = (True, need_weight, need_bias)
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        dy, x, weight, weight.shape[:1], stride, padding, dilation, False, (0, 0), groups, mask
    )
    return dx.to(dtype), dweight.to(dtype) if need_weight else None, dbias.to(dtype) if need_bias else None


def lay_out(x: Tensor, weight: Tensor) -> Tensor:
    """x as a convolution with this weight takes it best.

    On a CPU with oneDNN that is channels_last while there are at least as many pixels as output channels, 1.2 to 1.4
    times as fast at Stable Diffusion's 64 x 64; beyond, reordering the weight costs more than the layout gains. In
    float32 it is never taken: oneDNN's 3 x 3 convolution is 4 times, GroupNorm 10 times as far from float64 there.
    """
    if x.device.type != "cpu":
        return x
    return x.contiguous(memory_format=_layout(x.shape, weight, x.dtype))


def _layout(input_shape: Sequence[int], weight: Tensor, dtype: torch.dtype) -> torch.memory_format:
    many_pixels = input_shape[2] * input_shape[3] >= weight.shape[0]
    return torch.channels_last if many_pixels and dtype in HALF_DTYPES else torch.contiguous_format


def conv2d_output_shape(
    x_shape: Sequence[int], weight_shape: Sequence[int], stride: list[int], padding: list[int], dilation: list[int]
) -> list[int]:
    """[N, D, H', W'] of a convolution."""
    pixels = [
        (x_shape[2 + i] + 2 * padding[i] - dilation[i] * (weight_shape[2 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    ]
    return [x_shape[0], weight_shape[0], *pixels]


def _setup_conv2d(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, *ctx.geometry, _, _ = inputs
    ctx.input_shape, ctx.input_dtype = x.shape, x.dtype
    ctx.save_for_backward(weight)


def _conv2d_autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (weight,) = ctx.saved_tensors
    return _call_conv2d_backward(dy, weight, list(ctx.input_shape), *ctx.geometry, ctx.input_dtype), *(None,) * 8


_conv2d_backward.register_autograd(no_second_derivative("frozen_conv2d"))
_conv2d.register_autograd(_conv2d_autograd, setup_context=_setup_conv2d)
_call_conv2d = direct(_conv2d, _setup_conv2d, _conv2d_autograd)
_call_conv2d_backward = direct_backward(_conv2d_backward)


@torch.library.custom_op("lightning_aigc::frozen_linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    y = linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
    # A view of its own result could not be changed in place.
    result: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))
    return result


@torch.library.custom_op("lightning_aigc::frozen_linear_backward", mutates_args=())
def _linear_backward(dy: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return matmul(dy, weight.to(dy.dtype)).to(dtype)


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


_linear_backward.register_autograd(no_second_derivative("frozen_linear"))
_linear.register_autograd(_linear_autograd, setup_context=_setup_linear)
_call_linear = direct(_linear, _setup_linear, _linear_autograd)
_call_linear_backward = direct_backward(_linear_backward)
