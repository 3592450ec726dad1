"""Parameters of `qk_norm_rope`, and rotary embeddings in its form, from the forms that diffusers passes.

`rotary_from_*` return cos and sin [T, D/2] or [N, T, D/2] in float32; call them once per forward of a model, not once
per block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NormRope(NamedTuple):
    """RMSNorm with an optional weight [D], and a rotation by cos and sin [T, D/2] or [N, T, D/2], or None."""

    weight: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    eps: float = 1e-6
    norm: bool = True

    @property
    def changes_nothing(self) -> bool:
        """Whether the query or key stays as it is."""
        return not self.norm and self.cos is None


def check(op: str, sizes: tuple[int, ...], how: NormRope) -> None:
    """Raise ValueError if weight, cos and sin do not fit a query or key of the sizes (N, T, H, D)."""
    samples, tokens, _, features = sizes
    weight, cos, sin, _, norm = how
    if weight is not None and not norm:
        raise ValueError(f"{op} got a weight with norm=False, which would not be used; leave it out")
    if weight is not None and weight.shape != (features,):
        raise ValueError(f"{op} wants a weight {(features,)} for {features} features a head, got {tuple(weight.shape)}")
    if (cos is None) != (sin is None):
        raise ValueError(f"{op} wants both cos and sin, or neither, got only {'sin' if cos is None else 'cos'}")
    if cos is None or sin is None:
        return
    pairs = features // 2
    fitting = (tokens, pairs), (samples, tokens, pairs)
    if features % 2 or cos.shape != sin.shape or cos.shape not in fitting:
        got = f"{tuple(cos.shape)} and {tuple(sin.shape)} for {features} features a head"
        raise ValueError(f"{op} wants cos and sin {fitting[0]} or {fitting[1]}, got {got}")
    if cos.is_complex():
        raise ValueError(f"{op} wants real cos and sin, got {cos.dtype}; use rotary_from_complex")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError(f"{op} gives cos and sin no gradient, got ones that want it; use cos.detach()")


def rotary_from_repeated(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each pair, from [..., D] with each value twice.

    FLUX.1 and FLUX.2 (`repeat_interleave_real`) pass this form.
    Raises: ValueError for unequal shapes or an odd last dimension.
    """
    if cos.shape != sin.shape or cos.dim() < 1 or cos.shape[-1] % 2:
        raise ValueError(f"cos and sin must be [..., D] with an even D, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    return cos[..., ::2].float().contiguous(), sin[..., ::2].float().contiguous()


def rotary_from_complex(freqs_cis: Tensor, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Return cos and sin on `device`, from cos + i sin [..., D/2]: Qwen-Image and Z-Image.

    The parts are taken where `freqs_cis` lies, so that no complex number reaches a device that may not know them.
    Raises: ValueError for a real tensor.
    """
    if not freqs_cis.is_complex():
        raise ValueError(f"freqs_cis must be complex, got {freqs_cis.dtype}; use rotary_from_repeated for cos and sin")
    parts = torch.view_as_real(freqs_cis.resolve_conj())
    cos, sin = (part.to(device=device, dtype=torch.float32).contiguous() for part in parts.unbind(-1))
    return cos, sin
