"""What is done to a query or key: RMSNorm over a head's features, then rotation."""

from __future__ import annotations

from typing import NamedTuple

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
