"""The norm of all gradients at every step, or a probe of whether they are finite."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_aigc.callbacks.health.parameter_stats import Named, gradients_of, norms, sample_rows
from lightning_aigc.sharding.local_parts import gradient_norm

PROBED, PROBE_SAMPLES = 64, 16
"""Gradients of a large model's probe, and values of each. A sample is enough: backward carries what is not finite on to
every layer before it."""
GRADIENT = operator.attrgetter("grad")


class GradientNorm:
    """The norm of one optimizer's gradients. What does not change from step to step is looked up once.

    Args:
        named: The optimizer's parameters.
        is_exact: Whether to read all gradients and not a sample.
    """

    def __init__(self, named: Named, is_exact: bool) -> None:
        self._all = named
        self.named, self.is_exact = named if is_exact else named[:: max(1, len(named) // PROBED)], is_exact
        self._parameters = [p for _, p in self.named]
        self._dtypes = {p.dtype for p in self._parameters}  # a gradient has its parameter's
        self._may_be_sparse = True

    @torch.no_grad()
    def norm_or_probe(self, is_due: bool, loss: Tensor | None = None) -> Tensor | None:
        """Return the norm of all gradients, or for a large model a number that is finite if a sample of them is.

        Where they are sharded it is the norm of all ranks' parts, by one collective, and finite on no rank if one
        rank's `loss` is not: what follows asks all ranks alike.

        A gradient's layout is looked up at the first step and at each look.
        """
        if is_due or self._may_be_sparse:
            gradients = gradients_of(self.named)
            self._may_be_sparse = any(g.is_sparse for p in self._parameters if (g := p.grad) is not None)
        else:
            gradients = [g for g in map(GRADIENT, self._parameters) if g is not None]
        if not gradients:
            return None
        if isinstance(gradients[0], DTensor):
            return gradient_norm(gradients_of(self._all), loss)
        if self.is_exact:
            norm: Tensor = torch.linalg.vector_norm(norms(gradients, self._dtypes))
            return norm
        return sample_rows(gradients, PROBE_SAMPLES).sum()
