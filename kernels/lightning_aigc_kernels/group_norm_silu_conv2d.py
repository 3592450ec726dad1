"""GroupNorm, SiLU and convolution as one op that saves only its input, even if the convolution's weight is trained.

Native autograd saves the input, the normalised and the activated tensor. The gradient of a trainable weight needs the
activated tensor, which backward recomputes element-wise. The kernels are `group_norm_silu`'s and torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_aigc_kernels.convolution import (
    Geometry,
    check_conv2d,
    conv2d_output_shape,
    convolve,
    convolve_backward,
)
from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import (
    backward_dtype,
    check_density,
    compute_dtype,
    refuse_functorch,
    without_autocast,
    without_values,
)
from lightning_aigc_kernels.group_norm_silu import op as normalization
from lightning_aigc_kernels.group_norm_silu.affine import NormSiLU
from lightning_aigc_kernels.group_norm_silu.reference import group_norm_silu as group_norm_silu_reference
from lightning_aigc_kernels.packing import empty_wanted, spread, wanted


def group_norm_silu_conv2d(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    num_groups: int,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    silu: bool = True,
    input_grad_density: float = 1.0,
    grad_dtype: torch.dtype | None = None,
    skip_product: bool = False,
) -> Tensor:
    """conv2d(silu(group_norm(x) * (1 + scale) + shift)), saving x and the group statistics for backward.

    Args: as `group_norm_silu` and conv2d. `grad_dtype` is the dtype of backward's convolutions, for a scaled loss.
        `skip_product` omits the convolution and returns meaningless values, for a recomputed forward whose output is
        not read.
    Returns: [N, D, H', W'], in autocast's dtype if it is enabled, else x's.
    Raises: ValueError for a wrong shape or density; RuntimeError under torch.func.
    """
    refuse_functorch("group_norm_silu_conv2d")
    normalization.check(x, norm_weight, norm_bias, num_groups, scale, shift)
    check_conv2d("group_norm_silu_conv2d", x, weight, groups)
    check_density(input_grad_density, "input_grad_density")
    dtype = compute_dtype(x)
    with without_autocast(x):
        y: Tensor = _call(
            x, norm_weight, norm_bias, scale, shift, weight, bias, num_groups, eps, silu, input_grad_density,
            list(stride), list(padding), list(dilation), groups, dtype, grad_dtype, skip_product,
        )[0]  # fmt: skip
    return y


@torch.library.custom_op("lightning_aigc::group_norm_silu_conv2d", mutates_args=())
def _op(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    norm_groups: int,
    eps: float,
    silu: bool,
    density: float,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    skip_product: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    norm = NormSiLU(norm_weight, norm_bias, scale, shift, norm_groups, eps, silu)
    geometry = Geometry(stride, padding, dilation, groups)
    activated, mean, rstd = normalization.forward(x, norm)
    if skip_product:
        return without_values(activated, conv2d_output_shape(x.shape, weight.shape, geometry), dtype), mean, rstd
    return convolve(activated, weight, bias, geometry, dtype), mean, rstd


@_op.register_fake
def _(  # type: ignore[no-untyped-def]
    x, norm_weight, norm_bias, scale, shift, weight, bias, norm_groups, eps, silu, density,
    stride, padding, dilation, groups, dtype, grad_dtype, skip_product
):  # fmt: skip
    geometry = Geometry(stride, padding, dilation, groups)
    statistics = x.new_empty((x.shape[0], norm_groups), dtype=normalization.statistics_dtype(x, norm_weight))
    if skip_product:
        y = without_values(x, conv2d_output_shape(x.shape, weight.shape, geometry), dtype)
    else:
        y = convolve(normalization.made_like(x), weight, bias, geometry, dtype)
    return y, statistics, torch.empty_like(statistics)


@torch.library.custom_op("lightning_aigc::group_norm_silu_conv2d_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    needs: list[bool],
    norm_groups: int,
    eps: float,
    silu: bool,
    density: float,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
) -> list[Tensor]:
    """dx, then the gradients of the parameters that `needs` selects."""
    norm = NormSiLU(norm_weight, norm_bias, scale, shift, norm_groups, eps, silu)
    *need_affine, need_weight, need_bias = needs
    activated: Tensor | list[int] = list(x.shape)
    if need_weight:
        activated = normalization.forward(x, norm)[0].to(dtype)
    dy = dy.to(backward_dtype(grad_dtype, dtype))
    geometry = Geometry(stride, padding, dilation, groups)
    dactivated, dweight, dbias = convolve_backward(dy, activated, weight, geometry, need_weight, need_bias)
    dx, *daffine = normalization.backward(dactivated, x, mean, rstd, norm, any(need_affine), density)
    found = wanted((*daffine, dweight, dbias), (*norm.tensors, weight, bias), needs)
    return [dx, *(gradient.contiguous() for gradient in found)]


@_backward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    dy, x, mean, rstd, norm_weight, norm_bias, scale, shift, weight, bias, needs, groups, eps, silu, density, *options
):
    parameters = (norm_weight, norm_bias, scale, shift, weight, bias)
    return [normalization.made_like(x, any(needs[:4]), density), *empty_wanted(parameters, needs)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *parameters = inputs[:7]
    ctx.options = inputs[7:-1]
    _, mean, rstd = output
    ctx.save_for_backward(x, mean, rstd, *parameters)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dy: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 18
    needs = list(ctx.needs_input_grad[1:7])
    dx, *gradients = _call_backward(dy, *ctx.saved_tensors, needs, *ctx.options)
    return dx, *spread(iter(gradients), needs), *(None,) * 11


_call, _call_backward = register_autograd(_op, _backward_op, _setup_context, _autograd)


def group_norm_silu_conv2d_reference(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    num_groups: int,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """Compute `group_norm_silu_conv2d` in plain torch, with torch's autograd."""
    activated = group_norm_silu_reference(
        x, norm_weight, norm_bias, num_groups, eps, scale=scale, shift=shift, silu=silu
    )
    return F.conv2d(activated, weight, bias, stride, padding, dilation, groups)
