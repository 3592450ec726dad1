"""GroupNorm, an optional timestep scale and shift, and SiLU as one op that saves its input and the group statistics.

Native autograd saves the input, the normalised tensor and often the activated tensor. Here backward recomputes both
element-wise, and computes the gradients of the input and of the affine tensors in one pass. The reference runs on every
device, Triton on cuda and npu; on npu torch_npu's `npu_group_norm_swish` where it is as exact (`npu_kernel.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import (
    HALF_DTYPES,
    cast,
    check_density,
    compute_dtype,
    kernel_for,
    refuse_functorch,
    without_autocast,
)
from lightning_aigc_kernels.group_norm_silu import npu_kernel, reference
from lightning_aigc_kernels.group_norm_silu.affine import NormSiLU, affine_of
from lightning_aigc_kernels.packing import empty_wanted


def group_norm_silu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float = 1e-5,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    silu: bool = True,
    input_grad_density: float = 1.0,
) -> Tensor:
    """silu(group_norm(x) * (1 + scale) + shift), saving x and the group statistics for backward.

    Args: x [N, C, ...]; weight and bias [C]; scale and shift of the timestep [N, C]; `silu=False` omits the activation.
        An `input_grad_density` below 1 keeps only that share of the input's gradient, the largest magnitudes of each
        sample's group: lossy, off by default.
    Returns: x's shape, in autocast's dtype if it is enabled, else x's.
    Raises: ValueError if the groups do not divide the channels or a shape does not match; RuntimeError under
        torch.func.
    """
    refuse_functorch("group_norm_silu")
    check(x, weight, bias, num_groups, scale, shift)
    check_density(input_grad_density, "input_grad_density")
    dtype = compute_dtype(x)
    with without_autocast(x):
        y: Tensor = _call(x, weight, bias, scale, shift, num_groups, eps, silu, input_grad_density)[0]
    return cast(y, dtype)


def check(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, scale: Tensor | None, shift: Tensor | None
) -> None:
    """Raise ValueError for shapes that GroupNorm does not support."""
    if x.dim() < 2:
        raise ValueError(f"group_norm_silu wants x [N, C, ...], got {tuple(x.shape)}")
    samples, channels = x.shape[:2]
    if groups < 1 or channels % groups:
        raise ValueError(f"num_groups must divide the channels: got {groups} groups for {channels} channels")
    if weight is None and bias is not None:
        raise ValueError("group_norm_silu needs a weight with a bias, got only a bias; use a weight of ones")
    for name, tensor, shape in (
        ("weight", weight, (channels,)),
        ("bias", bias, (channels,)),
        ("scale", scale, (samples, channels)),
        ("shift", shift, (samples, channels)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {shape} for x {tuple(x.shape)}, got {tuple(tensor.shape)}")


@torch.library.custom_op("lightning_aigc::group_norm_silu", mutates_args=())
def _op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    density: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return forward(x, NormSiLU(weight, bias, scale, shift, groups, eps, silu))


def forward(x: Tensor, norm: NormSiLU) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean_NG and rstd_NG by the device's fastest implementation, without autograd, for larger ops."""
    if npu_kernel.serves(x, norm):
        return npu_kernel.forward(x, norm)
    kernel = kernel_for("group_norm_silu", x)
    if kernel is None:
        return reference.forward(x, norm)
    x = x.contiguous(memory_format=_layout_for(x))
    y, mean_NG, rstd_NG = kernel.forward(x, affine_of(x, *norm.tensors), norm.groups, norm.eps, norm.silu)
    return y, mean_NG, rstd_NG


def backward(
    dy: Tensor, x: Tensor, mean_NG: Tensor, rstd_NG: Tensor, norm: NormSiLU, need_affine: bool, density: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight, bias, scale and shift; without `need_affine` the last four are None."""
    dy = cast(dy, x.dtype)
    if density == 1 and npu_kernel.serves(x, norm):
        return *npu_kernel.backward(dy, x, mean_NG, rstd_NG, norm, need_affine), None, None
    kernel = kernel_for("group_norm_silu", x)
    if kernel is None:
        return reference.backward(dy, x, mean_NG, rstd_NG, norm, need_affine, density)
    affine = affine_of(x, *norm.tensors)
    layout = _layout_for(x, need_affine, density)
    dy, x = dy.contiguous(memory_format=layout), x.contiguous(memory_format=layout)
    dx, *grads = kernel.backward(dy, x, mean_NG, rstd_NG, affine, norm.groups, norm.silu, need_affine, density)
    dweight, dbias, dscale, dshift = (
        None if of is None else grad for grad, of in zip(grads, norm.tensors, strict=True)
    )
    return dx, dweight, dbias, dscale, dshift


@_op.register_fake
def _(x, weight, bias, scale, shift, groups, eps, silu, density):  # type: ignore[no-untyped-def]
    statistics = x.new_empty((x.shape[0], groups), dtype=statistics_dtype(x, weight))
    return made_like(x), statistics, torch.empty_like(statistics)


def made_like(x: Tensor, need_affine: bool = False, density: float = 1.0) -> Tensor:
    """An empty tensor with the shape and strides of `forward`'s y and, with its options, of `backward`'s dx."""
    is_kernels = kernel_for("group_norm_silu", x) is not None
    layout = _layout_for(x, need_affine, density) if is_kernels else reference.layout(x)
    return torch.empty_like(x, memory_format=layout)


def _layout_for(x: Tensor, need_affine: bool = False, density: float = 1.0) -> torch.memory_format:
    """The memory format in which the kernels read x: channels_last is kept where they can."""
    kept = x.device.type == "cuda" and not need_affine and density == 1 and reference.is_channels_last(x)
    return torch.channels_last if kept else torch.contiguous_format


def statistics_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype of `forward`'s mean and rstd."""
    half = x.dtype in HALF_DTYPES
    if kernel_for("group_norm_silu", x) is None and (x.device.type != "cpu" or weight is None):
        return torch.float32 if x.device.type == "cuda" and half else x.dtype
    return torch.float32 if half else x.dtype


@torch.library.custom_op("lightning_aigc::group_norm_silu_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    need_affine: bool,
    density: float,
) -> list[Tensor]:
    """dx, and with `need_affine` the gradients of the present tensors among weight, bias, scale and shift."""
    norm = NormSiLU(weight, bias, scale, shift, groups, eps, silu)
    dx, *gradients = backward(dy, x, mean, rstd, norm, need_affine, density)
    pairs = zip(gradients, norm.tensors, strict=True)
    return [dx, *(g.to(p.dtype) for g, p in pairs if g is not None and p is not None)]


@_backward_op.register_fake
def _(dy, x, mean, rstd, weight, bias, scale, shift, groups, eps, silu, need_affine, density):  # type: ignore[no-untyped-def]
    return [made_like(x, need_affine, density), *empty_wanted((weight, bias, scale, shift), (need_affine,) * 4)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, scale, shift, *ctx.options = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, mean, rstd, weight, bias, scale, shift)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dy: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 9
    x, mean, rstd, *parameters = ctx.saved_tensors
    groups, eps, silu, density = ctx.options
    need_affine = any(ctx.needs_input_grad[1:5])
    grads = iter(_call_backward(dy, x, mean, rstd, *parameters, groups, eps, silu, need_affine, density))
    dx = next(grads)
    dparameters = (None if p is None or not need_affine else next(grads) for p in parameters)
    return dx, *dparameters, None, None, None, None


_call, _call_backward = register_autograd(_op, _backward_op, _setup_context, _autograd)
