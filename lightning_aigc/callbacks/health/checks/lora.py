"""Checks of a LoRA: a B that stays zero, a B far larger than A, and a change larger than the base weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_aigc.callbacks.health.alerts.alerts import Finding, Policy
from lightning_aigc.callbacks.health.checks.interface import Check, Findings
from lightning_aigc.callbacks.health.parameter_names import clean_name, lora_pairs
from lightning_aigc.callbacks.health.parameter_stats import Named, ParameterStats
from lightning_aigc.callbacks.health.remedies import Remedies
from lightning_aigc.callbacks.health.step_reading import StepReading
from lightning_aigc.callbacks.health.thresholds import HealthThresholds


class LoRACheck(Check):
    """Compares each LoRA's matrices with one another and with their base weight, at each look."""

    policies: ClassVar = {"lora_b_zero": Policy(), "lora_imbalance": Policy(), "lora_delta": Policy()}

    def attach(self, model: nn.Module, trained: Named, frozen: Named) -> None:
        self._deltas = LoRADeltas(model)

    def run(self, reading: StepReading) -> Findings | None:
        stats, limits, remedies = reading.stats, reading.limits, reading.remedies
        if stats is None or not reading.is_due:
            return None
        found = check_pairs(stats, reading.taken_steps - 1, limits, remedies)
        found += self._deltas.check(stats, limits, remedies)
        return Findings(found, self.policies, reading.layers_of(stats.names))


def check_pairs(stats: ParameterStats, taken_steps: int, limits: HealthThresholds, remedies: Remedies) -> list[Finding]:
    """Find each B that is still zero after `lora_b_steps` steps, and each that is far larger than its A."""
    weights = stats.by_name(stats.weight_norm)
    findings = []
    for a, b in lora_pairs(stats.names).values():
        if weights[b] == 0 and taken_steps >= limits.lora_b_steps:
            findings.append(
                Finding(
                    "lora_b_zero",
                    b,
                    "error",
                    f"after {taken_steps} steps it is still zero, and the LoRA does nothing",
                    "no optimizer holds it, its gradient is zero, or its learning rate is",
                    "give it to the optimizer, at a learning rate above 0"
                    if remedies.rate is None
                    else remedies.learning_rate(1),
                )
            )
        elif weights[a] > 0 and weights[b] / weights[a] > limits.lora_imbalance:
            findings.append(
                Finding(
                    "lora_imbalance",
                    b,
                    "warning",
                    f"its norm is {weights[b] / weights[a]:.3g} times that of A",
                    "a learning rate of B that is too high, or an A that was scaled down",
                    remedies.learning_rate(0.2),
                )
            )
    return findings


class LoRADeltas:
    """The change that each LoRA layer adds to its base weight: scale * B @ A, and W."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, tuple[nn.Module, str]] = {}
        for name, module in model.named_modules():
            if hasattr(module, "lora_A") and hasattr(module, "base_layer") and isinstance(module.lora_A, nn.ModuleDict):
                adapter = next(iter(module.lora_A), None)
                if adapter is not None:
                    self._layers[clean_name(name)] = (module, adapter)
        self._base_norms: dict[str, float] = {}

    @torch.no_grad()
    def check(self, stats: ParameterStats, limits: HealthThresholds, remedies: Remedies) -> list[Finding]:
        """Find layers whose change outgrew the base. Waits for the device only where norms cannot rule that out."""
        if not self._layers:
            return []
        weights = stats.by_name(stats.weight_norm)
        if not self._base_norms:
            self._base_norms = _norms({name: _base(module) for name, (module, _) in self._layers.items()})
        findings = []
        for name, (module, adapter) in self._layers.items():
            a, b = f"{name}.lora_A.{adapter}.weight", f"{name}.lora_B.{adapter}.weight"
            base = self._base_norms[name]
            scale = abs(float(module.scaling[adapter]))  # type: ignore[index]
            # |BA| is at most |B| |A|, which costs nothing.
            if not scale * weights.get(a, 0.0) * weights.get(b, 0.0) > limits.lora_delta * base:
                continue
            ratio = scale * _product_norm(module.lora_A[adapter].weight, module.lora_B[adapter].weight) / base  # type: ignore[index, union-attr]
            if ratio > limits.lora_delta and math.isfinite(ratio):
                findings.append(
                    Finding(
                        "lora_delta",
                        name,
                        "warning",
                        f"the LoRA adds {ratio:.2g} times the size of the base weight",
                        "a learning rate that is too high, or too many steps: the base model is being written over",
                        remedies.learning_rate(0.3),
                    )
                )
        return findings


def _base(module: nn.Module) -> Tensor:
    weight: Tensor = module.base_layer.weight  # type: ignore[assignment, union-attr]
    return weight.detach()


def _norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    stacked = torch.stack([torch.linalg.vector_norm(t.float()) for t in tensors.values()])
    return dict(zip(tensors, stacked.clamp(min=1e-20).tolist(), strict=True))


def _product_norm(a: Tensor, b: Tensor) -> float:
    """The Frobenius norm of B @ A without the product: trace of (B^T B)(A A^T)."""
    a_RN, b_MR = a.detach().float().flatten(1), b.detach().float().flatten(1)
    return float(((b_MR.T @ b_MR) * (a_RN @ a_RN.T)).sum().clamp(min=0).sqrt())
