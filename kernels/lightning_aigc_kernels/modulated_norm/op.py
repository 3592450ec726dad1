"""A norm over channels with a sample's scale and shift as one op that saves x and the small vectors alone.

Native autograd saves x, for a trained weight or scale the normalised tensors too, and for an RMSNorm in half precision
its float32 copies. Here backward reads x again and recomputes its statistics. As in diffusers' AdaLayerNormZero and
AdaLayerNormContinuous (SD 3, FLUX), FLUX.2's modulation, Qwen-Image's `_modulate` without an index, and Z-Image's
RMSNorm with a scale. The reference runs on every device, Triton on cuda and npu; torch_npu's `npu_rms_norm` takes one
weight for all samples and no shift, so it does not serve.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_aigc_kernels.custom_op import register_autograd
from lightning_aigc_kernels.dispatch import compute_dtype, kernel_for, refuse_functorch, without_autocast
from lightning_aigc_kernels.modulated_norm import reference
from lightning_aigc_kernels.modulated_norm.modulation import (
    Gradients,
    Modulation,
    Needs,
    NormKind,
    check_channels,
    check_tokens,
    row_of_each_sample,
)


def modulated_norm(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    norm: NormKind = "layer",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """(norm(x) * weight + bias) * (1 + scale) + shift, saving x for backward and nothing else of its size.

    Args: x [N, T, C]; scale and shift [N, C] or [N, 1, C], one row a sample, or one row for all; weight and bias [C].
        Absent tensors are skipped. `norm` is LayerNorm or RMSNorm over C, with statistics in float32.
    Returns: x's shape, in autocast's dtype if it is enabled, else x's.
    Raises: ValueError for an unknown norm or a shape that does not match; RuntimeError under torch.func.
    """
    refuse_functorch("modulated_norm")
    check_tokens("modulated_norm", x)
    if norm not in ("layer", "rms"):
        raise ValueError(f"norm must be 'layer' or 'rms', got {norm!r}")
    check_channels("weight", weight, x)
    check_channels("bias", bias, x)
    scale, shift = row_of_each_sample("scale", scale, x), row_of_each_sample("shift", shift, x)
    dtype = compute_dtype(x)
    with without_autocast(x):
        y: Tensor = _call(x, scale, shift, weight, bias, norm, eps, dtype)
    return y


def forward(x: Tensor, modulation: Modulation, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """norm(x) * slope + offset + residual by the device's fastest implementation, without autograd."""
    kernel = kernel_for("modulated_norm", x)
    implementation = reference if kernel is None else kernel
    y: Tensor = implementation.forward(x, modulation, dtype, residual)
    return y


def backward(dy: Tensor, x: Tensor | None, modulation: Modulation, dtype: torch.dtype, needs: Needs) -> Gradients:
    """The needed gradients of x, scale, shift, weight and bias, without autograd; see the reference."""
    kernel = kernel_for("modulated_norm", dy)
    implementation = reference if kernel is None else kernel
    gradients: Gradients = implementation.backward(dy, x, modulation, dtype, needs)
    return gradients


@torch.library.custom_op("lightning_aigc::modulated_norm", mutates_args=())
def _op(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: str,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    return forward(x, Modulation(scale, shift, weight, bias, norm, eps, True), dtype)


@_op.register_fake
def _(x, scale, shift, weight, bias, norm, eps, dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("lightning_aigc::modulated_norm_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: str,
    eps: float,
    dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor]:
    """The needed gradients of x, scale, shift, weight and bias; dx in `dtype`. `x` is None if only sums of dy are."""
    modulation = Modulation(scale, shift, weight, bias, norm, eps, True)
    return [gradient for gradient in backward(dy, x, modulation, dtype, Needs(*needs)) if gradient is not None]


@_backward_op.register_fake
def _(dy, x, scale, shift, weight, bias, norm, eps, dtype, needs):  # type: ignore[no-untyped-def]
    made = [dy.new_empty(dy.shape, dtype=dtype)] if needs[0] else []
    pairs = zip((scale, shift, weight, bias), needs[1:], strict=True)
    return made + [tensor.new_empty(tensor.shape) for tensor, need in pairs if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, shift, weight, bias, *ctx.options, _ = inputs
    ctx.dtype = x.dtype
    need_x, need_scale, _, need_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if need_x or need_scale or need_weight else None, scale, shift, weight, bias)


def _autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:5])
    gradients = iter(_call_backward(dy, *ctx.saved_tensors, *ctx.options, ctx.dtype, needs))
    return *(next(gradients) if need else None for need in needs), None, None, None


_call, _call_backward = register_autograd(_op, _backward_op, _setup_context, _autograd)
