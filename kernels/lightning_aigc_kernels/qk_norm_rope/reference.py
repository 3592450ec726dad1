"""RMSNorm and rotary position embedding in plain torch, the reference of the kernels.

Dimensions: N samples, T tokens, H heads, D features of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_aigc_kernels.qk_norm_rope.norm_rope import NormRope


def qk_norm_rope(
    x: Tensor,
    weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm: bool = True,
) -> Tensor:
    """rotate(rms_norm(x) * weight) of [N, T, H, D], with torch's autograd.

    As FLUX.1's attention does it: the norm rounds to x's dtype, the rotation is in float32.
    """
    if norm:
        x = F.rms_norm(x, x.shape[-1:], weight, eps)
    if cos is None or sin is None:
        return x if norm else x.clone()
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.to(wide).repeat_interleave(2, -1).unsqueeze(-2) for t in (cos, sin))
    x0, x1 = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    turned = torch.stack((-x1, x0), -1).flatten(-2)
    return (x.to(wide) * cos + turned.to(wide) * sin).to(x.dtype)


def forward(x_NTHD: Tensor, how: NormRope, out_NTHD: Tensor) -> Tensor:
    """rotate(rms_norm(x) * weight), computed in float32 or wider and rounded once, written to `out`."""
    return out_NTHD.copy_(_computed(x_NTHD, how))


def backward(
    dy_NTHD: Tensor, x_NTHD: Tensor, how: NormRope, dx_NTHD: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, written to `dx`, and if needed that of the weight, in float32 or wider.

    Args: x is not read without norm.
    """
    wide = torch.promote_types(x_NTHD.dtype, torch.float32)
    g = dy_NTHD.to(wide)
    if how.cos is not None and how.sin is not None:
        g = _rotated(g, how.cos, -how.sin)
    if not how.norm:
        return dx_NTHD.copy_(g), None
    x = x_NTHD.to(wide)
    rstd = _rstd(x, how.eps)
    xhat = x * rstd
    dweight_D = (g * xhat).sum((0, 1, 2)) if need_weight else None
    if how.weight is not None:
        g = g * how.weight.to(wide)
    return dx_NTHD.copy_((g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd), dweight_D


def _computed(x_NTHD: Tensor, how: NormRope) -> Tensor:
    wide = torch.promote_types(x_NTHD.dtype, torch.float32)
    x = x_NTHD.to(wide)
    if how.norm:
        x = x * _rstd(x, how.eps)
    if how.weight is not None:
        x = x * how.weight.to(wide)
    return x if how.cos is None or how.sin is None else _rotated(x, how.cos, how.sin)


def _rstd(x_NTHD: Tensor, eps: float) -> Tensor:
    return (x_NTHD.square().mean(-1, keepdim=True) + eps).rsqrt()


def _rotated(x_NTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x0 cos - x1 sin, x1 cos + x0 sin) of the interleaved pairs (x0, x1) of each head."""
    cos, sin = cos.to(x_NTHD.dtype).unsqueeze(-2), sin.to(x_NTHD.dtype).unsqueeze(-2)  # over the heads
    x0, x1 = x_NTHD.reshape(*x_NTHD.shape[:-1], x_NTHD.shape[-1] // 2, 2).unbind(-1)
    return torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).flatten(-2)
