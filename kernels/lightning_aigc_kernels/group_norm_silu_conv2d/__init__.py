"""GroupNorm, SiLU and convolution as one op that keeps one tensor, its input, whatever the convolution's weight needs.

Native autograd keeps three: the input, the normalised and the activated tensor. A trainable weight's gradient needs the
activated one, which backward computes again element by element. Kernels are `group_norm_silu`'s and the device's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels import group_norm_silu as normalization
from lightning_aigc_kernels.calling import (
    backward_dtype,
    check_density,
    compute_dtype,
    direct,
    direct_backward,
    no_second_derivative,
    refuse_functorch,
    without_autocast,
    without_values,
)
from lightning_aigc_kernels.frozen_conv2d import (
    check_conv2d,
    conv2d_output_shape,
    convolve,
    convolve_backward,
)

__all__ = ["group_norm_silu_conv2d"]


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
    """conv2d(silu(group_norm(x) * (1 + scale) + shift)), keeping x and the statistics of its groups for backward.

    Args: as `group_norm_silu` and conv2d. `grad_dtype` runs backward's convolutions in that dtype, for a loss that is
        scaled to fit it. `skip_product` leaves the convolution out and returns numbers without meaning, for a forward
        pass that is repeated for what backward needs of it alone.
    Returns: [N, D, H', W'], in autocast's dtype where that is on, else x's.
    Raises: ValueError for shapes or a density that do not fit; RuntimeError under torch.func.
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
    activated, mean, rstd = normalization.forward(x, norm_weight, norm_bias, scale, shift, norm_groups, eps, silu)
    if skip_product:
        shape = conv2d_output_shape(list(x.shape), list(weight.shape), stride, padding, dilation)
        return without_values(activated, shape, dtype), mean, rstd
    return convolve(activated, weight, bias, stride, padding, dilation, groups, dtype), mean, rstd


@_op.register_fake
def _(  # type: ignore[no-untyped-def]
    x, norm_weight, norm_bias, scale, shift, weight, bias, norm_groups, eps, silu, density,
    stride, padding, dilation, groups, dtype, grad_dtype, skip_product
):  # fmt: skip
    statistics = x.new_empty((x.shape[0], norm_groups), dtype=normalization.statistics_dtype(x, norm_weight))
    if skip_product:
        y = without_values(x, conv2d_output_shape(x.shape, weight.shape, stride, padding, dilation), dtype)
    else:
        y = convolve(normalization.made_like(x), weight, bias, stride, padding, dilation, groups, dtype)
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
    """dx, then the gradients of those parameters that `needs` names: the norm's two, scale, shift, weight, bias."""
    grad_dtype = backward_dtype(grad_dtype, dtype)
    dy = dy.to(grad_dtype)
    activated: Tensor | list[int] = list(x.shape)
    if needs[4]:
        affine = norm_weight, norm_bias, scale, shift
        activated = normalization.forward(x, *affine, norm_groups, eps, silu)[0].to(dtype)
    geometry = stride, padding, dilation, groups
    dactivated, dweight, dbias = convolve_backward(dy, activated, weight, *geometry, needs[4], needs[5])
    need_affine = any(needs[:4])
    dx, *daffine = normalization.backward(
        dactivated, x, mean, rstd, norm_weight, norm_bias, scale, shift, norm_groups, eps, silu, need_affine, density
    )
    parameters = (norm_weight, norm_bias, scale, shift, weight, bias)
    grads = (*daffine, dweight, dbias)
    return [dx] + [
        grad.to(of.dtype).contiguous()
        for grad, of, need in zip(grads, parameters, needs, strict=True)
        if need and grad is not None and of is not None
    ]


@_backward_op.register_fake
def _(dy, x, mean, rstd, norm_weight, norm_bias, scale, shift, weight, bias, needs, *options):  # type: ignore[no-untyped-def]
    parameters = (norm_weight, norm_bias, scale, shift, weight, bias)
    given = (p for p, need in zip(parameters, needs, strict=True) if need)
    return [normalization.made_like(x), *(p.new_empty(p.shape) for p in given)]


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
    dx, *grads = _call_backward(dy, *ctx.saved_tensors, needs, *ctx.options)
    given = iter(grads)
    return dx, *(next(given) if need else None for need in needs), *(None,) * 11


_backward_op.register_autograd(no_second_derivative("group_norm_silu_conv2d"))
_op.register_autograd(_autograd, setup_context=_setup_context)
_call = direct(_op, _setup_context, _autograd)
_call_backward = direct_backward(_backward_op)
