"""LayerNorm forward and backward with torch's kernels and without autograd, as a building block of larger ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.dispatch import HALF_DTYPES, cast

aten = torch.ops.aten


class NormParameters(NamedTuple):
    """A LayerNorm over the last dimension; `on=False` passes its input through."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    on: bool = True


class Normalized(NamedTuple):
    """LayerNorm's output in the requested dtype, and the statistics for its backward."""

    value: Tensor
    mean: Tensor | None
    rstd: Tensor | None


def normalize(x_TC: Tensor, norm: NormParameters, dtype: torch.dtype) -> Normalized:
    """LayerNorm(x) in `dtype`, with statistics in float32 where the device supports it."""
    if not norm.on:
        return Normalized(cast(x_TC, dtype), None, None)
    weight, bias = affine_for(norm.weight, x_TC), affine_for(norm.bias, x_TC)
    value, mean, rstd = aten.native_layer_norm(x_TC, x_TC.shape[-1:], weight, bias, norm.eps)
    return Normalized(cast(value, dtype), mean, rstd)


def normalize_backward(
    dvalue_TC: Tensor, x_TC: Tensor, norm: NormParameters, made: Normalized, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias."""
    dvalue_TC = cast(dvalue_TC, x_TC.dtype)
    if not norm.on:
        return dvalue_TC, None, None
    weight, bias = affine_for(norm.weight, x_TC), affine_for(norm.bias, x_TC)
    mask = (True, need_weight, need_bias)
    dx, dweight, dbias = aten.native_layer_norm_backward(
        dvalue_TC, x_TC, x_TC.shape[-1:], made.mean, made.rstd, weight, bias, mask
    )
    return dx, dweight if need_weight else None, dbias if need_bias else None


def affine_for(parameter_C: Tensor | None, x: Tensor) -> Tensor | None:
    """Cast a norm's weight or bias for x's device: on a CPU to float32 for half-precision x, else to x's dtype."""
    if parameter_C is None:
        return None
    dtype = x.dtype
    if dtype in HALF_DTYPES and x.device.type == "cpu":
        dtype = torch.float32
    cast_C = cast(parameter_C, dtype)
    return cast_C if cast_C.is_contiguous() else cast_C.contiguous()  # norm kernels ignore strides


def layer_norm(x: Tensor, norm: NormParameters) -> Tensor:
    """Compute LayerNorm, or return x if the norm is off, with torch's autograd, for references."""
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps) if norm.on else x
