"""Reference formulas of the kernels, for autograd in any dtype, and the tolerances for the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def group_norm_silu_and_gradients(
    dtype: torch.dtype,
    eps: float,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    modulation: tuple[Tensor, ...],
    dy: Tensor,
    groups: int,
    silu: bool,
) -> tuple[Tensor, ...]:
    """act((GroupNorm(x) * weight + bias) * (1 + scale) + shift) computed in `dtype`, and autograd's gradients of x,
    weight, bias and the modulation, which is scale and shift or empty."""
    given = (x, weight, bias, *modulation)
    leaves = [tensor.detach().to(dtype).contiguous().requires_grad_() for tensor in given]
    samples, channels = x.shape[:2]
    grouped = leaves[0].reshape(samples, groups, -1)
    centred = grouped - grouped.mean(2, keepdim=True)
    xhat = (centred / (centred.square().mean(2, keepdim=True) + eps).sqrt()).reshape(samples, channels, -1)
    z = xhat * leaves[1][:, None] + leaves[2][:, None]
    if modulation:
        z = z * (1 + leaves[3][..., None]) + leaves[4][..., None]
    y = F.silu(z) if silu else z
    y = y.reshape(x.shape)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))


def geglu_and_gradient(
    dtype: torch.dtype, projected: Tensor, dproduct: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """value * act(gate) of both halves of a row, computed in `dtype`, and autograd's gradient of the projection."""
    leaf = projected.detach().to(dtype).requires_grad_()
    value, gate = leaf.chunk(2, dim=1)
    product = value * (F.gelu(gate) if activation == "gelu" else F.silu(gate))
    (dprojected,) = torch.autograd.grad(product, leaf, dproduct.to(dtype))
    return product.detach(), dprojected


def modulated_norm_and_gradients(
    dtype: torch.dtype, norm: str, eps: float, given: dict[str, Tensor], dy: Tensor
) -> dict[str, Tensor]:
    """residual + (norm(x) * weight + bias) * (1 + scale) + shift of the given tensors, computed in `dtype`, under "y",
    and autograd's gradient of each of them. A gate stands in the place of 1 + scale; the norm may be "none"."""
    leaves = {name: tensor.detach().to(dtype).contiguous().requires_grad_() for name, tensor in given.items()}
    z = leaves["x"]
    if norm == "layer":
        z = z - z.mean(-1, keepdim=True)
    if norm != "none":
        z = z / (z.square().mean(-1, keepdim=True) + eps).sqrt()
    z = z * leaves["weight"] if "weight" in leaves else z
    z = z + leaves["bias"] if "bias" in leaves else z
    z = z * (1 + leaves["scale"][:, None]) if "scale" in leaves else z
    z = z * leaves["gate"][:, None] if "gate" in leaves else z
    z = z + leaves["shift"][:, None] if "shift" in leaves else z
    y = z + leaves["residual"] if "residual" in leaves else z
    gradients = torch.autograd.grad(y, list(leaves.values()), dy.to(dtype))
    return {"y": y.detach()} | dict(zip(leaves, gradients, strict=True))


def silu_mul_and_gradients(dtype: torch.dtype, gate: Tensor, up: Tensor, dproduct: Tensor) -> tuple[Tensor, ...]:
    """silu(gate) * up computed in `dtype`, and autograd's gradients of gate and up."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (gate, up)]
    product = F.silu(leaves[0]) * leaves[1]
    return product.detach(), *torch.autograd.grad(product, leaves, dproduct.to(dtype))


def qk_norm_rope_and_gradients(
    dtype: torch.dtype, x: Tensor, weight: Tensor | None, angles: Tensor | None, dy: Tensor, eps: float, norm: bool
) -> tuple[Tensor, ...]:
    """RMSNorm and rotation of [N, T, H, D] by angles [T, D/2] or [N, T, D/2] computed in `dtype`, and autograd's
    gradients of x and the weight, if there is one. The rotation multiplies complex numbers."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight) if tensor is not None]
    z = leaves[0]
    if norm:
        z = z / (z.square().mean(-1, keepdim=True) + eps).sqrt()
    z = z * leaves[1] if weight is not None else z
    if angles is not None:
        # cos and sin reach the kernels in float32.
        turn = torch.complex(angles.cos().float().to(dtype), angles.sin().float().to(dtype)).unsqueeze(-2)
        z = torch.view_as_real(torch.view_as_complex(z.unflatten(-1, (-1, 2))) * turn).flatten(-2)
    return z.detach(), *torch.autograd.grad(z, leaves, dy.to(dtype))


def largest_by_sorting(rows_RL: Tensor, density: float) -> Tensor:
    """Each row's ceil(density * L) largest magnitudes, ties included, and zeros; NaN counts as infinite."""
    magnitude = rows_RL.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    smallest_kept = magnitude.sort(dim=1, descending=True).values[:, math.ceil(density * rows_RL.shape[1]) - 1, None]
    return torch.where(magnitude >= smallest_kept, rows_RL, 0)


def assert_as_exact_as_eager(ours: Tensor, eager: Tensor, truth: Tensor, ratio: float) -> None:
    """The largest error of `ours` is at most `ratio` times that of eager; eager is granted one rounding of its dtype.

    `truth` is float64. A missing element (NaN) fails; so does a NaN where the truth has none.
    """
    assert ours.dtype == eager.dtype and truth.dtype == torch.float64
    assert ours.shape == truth.shape
    one_rounding = torch.finfo(ours.dtype).eps * truth.abs().amax().item()
    allowed = ratio * max((eager.double() - truth).abs().amax().item(), one_rounding)
    error = (ours.double() - truth).abs().amax().item()
    assert error <= allowed, f"largest error {error:.3g}, allowed {allowed:.3g} ({ratio} times eager's)"
