"""Samples of the weights before a step, and how far the step moved them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_aigc.callbacks.health.parameter_names import lora_part
from lightning_aigc.callbacks.health.parameter_stats import Named, Sampler

SMALLEST_SHARE = 0.1
"""Share of the usual size of a new weight, 1 / sqrt(inputs), below which a weight's own size says nothing."""


class WeightSamples:
    """Entries of every matrix before a step, and how far the step moved them.

    Vectors (biases, norms' affine) start at zero or one and say little. Weights that start at zero, such as a LoRA's B,
    have no ratio: their first step is infinitely large beside them. One that starts near zero, such as a class token,
    is measured by the usual size of a weight with its inputs.
    """

    def __init__(self, named: Named) -> None:
        self.named = [(name, p) for name, p in named if p.dim() > 1 and _is_telling(name)]
        # Without a matrix, vectors are sampled: they still show whether they move.
        self.named = self.named or list(named)
        self._sampler = Sampler([p for _, p in self.named])
        self._is_from_zero = (self._sampler.rows() == 0).all(dim=1)
        inputs = [max(1, p.numel() // max(1, p.shape[0])) if p.dim() > 1 else 1 for _, p in self.named]
        smallest = [SMALLEST_SHARE * (self._sampler.count / n) ** 0.5 if n > 1 else 0.0 for n in inputs]
        self._smallest = torch.tensor(smallest)
        self._before: Tensor | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Sample the weights now."""
        self._before = self._sampler.rows()

    def drop(self) -> None:
        """Drop the samples."""
        self._before = None

    @torch.no_grad()
    def ratios(self) -> Tensor | None:
        """Norm of the change over norm of the weight, on the device; None if none were taken. Waits for nothing."""
        before, self._before = self._before, None
        if before is None:
            return None
        change_P = torch.linalg.vector_norm(self._sampler.rows() - before, dim=1)
        size_P = torch.linalg.vector_norm(before, dim=1).clamp(min=1e-20)
        ratio_P: Tensor = change_P / torch.maximum(size_P, self._smallest.to(size_P.device))
        return ratio_P.masked_fill(self._is_from_zero.to(ratio_P.device) & (ratio_P > 0), float("nan"))


def _is_telling(name: str) -> bool:
    part = lora_part(name)
    return part is None or part[1] == "A"
