"""Checks of what a step does to the weights: how far they move, and whether they are in an optimizer at all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_aigc.callbacks.health.alert import Check, Finding
from lightning_aigc.callbacks.health.measurement import Named, Sampler
from lightning_aigc.callbacks.health.names import lora_part
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.thresholds import HealthThresholds

CHECKS: tuple[Check, ...] = ("update_ratio", "no_update")
USUAL_RATIO = 3e-3
"""What a step of a healthy training changes a matrix by."""


class WeightSamples:
    """Entries of every matrix before a step, and how far the step moved them.

    Vectors (biases, norms' affine) start at zero or one and tell little; a LoRA's B and what else starts at zero is
    infinitely far from where it was after one step.
    """

    def __init__(self, named: Named) -> None:
        self.named = [(name, p) for name, p in named if p.dim() > 1 and _is_telling(name)]
        # A vector counts where there is nothing else, and still shows whether it moves.
        self.named = self.named or list(named)
        self._sampler = Sampler([p for _, p in self.named])
        self._is_from_zero = (self._sampler.rows() == 0).all(dim=1)
        self._before: Tensor | None = None

    @torch.no_grad()
    def take(self) -> None:
        self._before = self._sampler.rows()

    def drop(self) -> None:
        self._before = None

    @torch.no_grad()
    def ratios(self) -> Tensor | None:
        """Norm of the change over norm of the weight, on the device; None if nothing was taken. Waits for nothing."""
        before, self._before = self._before, None
        if before is None:
            return None
        change_P = torch.linalg.vector_norm(self._sampler.rows() - before, dim=1)
        ratio_P: Tensor = change_P / torch.linalg.vector_norm(before, dim=1).clamp(min=1e-20)
        return ratio_P.masked_fill(self._is_from_zero.to(ratio_P.device) & (ratio_P > 0), float("nan"))


def _is_telling(name: str) -> bool:
    part = lora_part(name)
    return part is None or part[1] == "A"


def check_updates(
    names: Sequence[str],
    ratios: Sequence[float],
    has_gradient: Iterable[bool],
    limits: HealthThresholds,
    remedies: Remedies,
) -> list[Finding]:
    """Weights that moved too far, and weights that did not move although they have a gradient."""
    findings, far = [], []
    told_slow = False
    for name, ratio, moves in zip(names, ratios, has_gradient, strict=True):
        if not math.isfinite(ratio) or not moves:
            continue
        if ratio == 0:
            findings.append(_unmoved(name, remedies))
        elif ratio > limits.update_ratio_high:
            far.append((ratio, name))
        elif ratio < limits.update_ratio_low and not told_slow:
            told_slow = True
            findings.append(
                Finding(
                    "update_ratio",
                    name,
                    "info",
                    f"a step changes it by {ratio:.1g} of its size",
                    "a learning rate that is too low",
                    remedies.learning_rate(10),
                )
            )
    if far:
        ratio, name = max(far)
        others = f", and {len(far) - 1} more weights too far" if len(far) > 1 else ""
        findings.append(
            Finding(
                "update_ratio",
                name,
                "error" if ratio > 1 else "warning",
                f"one step changes it by {ratio:.2g} of its size{others}",
                "a learning rate that is too high",
                remedies.learning_rate(float(f"{USUAL_RATIO / ratio:.1g}")),
            )
        )
    return findings


def _unmoved(name: str, remedies: Remedies) -> Finding:
    is_half = "true" in remedies.precision and not remedies.precision.startswith(("32", "64"))
    return Finding(
        "no_update",
        name,
        "warning",
        "it has a gradient, and the step did not change it",
        "half-precision weights round the step away"
        if is_half
        else "a learning rate of zero, or no optimizer holds it",
        remedies.mixed_precision() if is_half else remedies.learning_rate(10),
    )


def check_optimizers(named: Named, optimizers: Sequence[Optimizer]) -> list[Finding]:
    """Trainable parameters that no optimizer holds."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return [
        Finding(
            "not_in_optimizer",
            name,
            "error",
            "it is trainable, and no optimizer holds it",
            "configure_optimizers collected the parameters before this one existed, or chose among them",
            f"give it to the optimizer, or {name}.requires_grad_(False)",
        )
        for name, p in named
        if id(p) not in held
    ]
