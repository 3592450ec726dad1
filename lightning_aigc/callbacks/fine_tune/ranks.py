"""Effective rank of a LoRA's change B @ A, and its size relative to the weights that it changes.

Legend: R rank of the LoRA.
Source: effective rank, the exponential of the entropy of the singular values, Roy and Vetterli, EUSIPCO 2007.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_aigc_kernels.packed_weight import PackedWeight


@torch.no_grad()
def effective_ranks(model: nn.Module) -> dict[str, tuple[int, float]]:
    """(rank, effective rank) of each LoRA layer of peft whose change is finite and not zero."""
    found = {}
    for name, _, a, b, _ in lora_layers(model):
        if not (a.isfinite().all() and b.isfinite().all()):
            continue
        values_R = singular_values(a, b)
        if values_R.sum() > 0:
            found[name] = (len(a), effective_rank(values_R))
    return found


def lora_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor, Tensor, float]]:
    """Name, layer below, A, B and scale of each LoRA layer of peft."""
    for name, module in model.named_modules():
        matrices = getattr(module, "lora_A", None)
        if isinstance(matrices, nn.ModuleDict) and len(matrices):
            adapter = next(iter(matrices))
            layer: Any = module
            weights = [layer.lora_A[adapter].weight, layer.lora_B[adapter].weight]
            yield name, layer.base_layer, *weights, float(layer.scaling[adapter])


@torch.no_grad()
def adapter_size(model: nn.Module, base_norms: dict[str, float]) -> float | None:
    """Norm of a LoRA's change over that of the weights that it changes; None without a LoRA, or where it is sharded.

    Args: base_norms: squared norms of the weights by name, filled at the first call.
    """
    change = base = 0.0
    for name, layer, a, b, scale in lora_layers(model):
        if isinstance(a, DTensor):
            return None
        a_RN, b_MR = a.float().flatten(1), b.float().flatten(1)
        # The norm of B @ A without the product: tr((B'B)(AA')).
        change += scale**2 * float(((b_MR.T @ b_MR) * (a_RN @ a_RN.T)).sum())
        if name not in base_norms:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            whole = weight.dequantize() if isinstance(weight, PackedWeight) else weight
            base_norms[name] = float(whole.float().square().sum())
        base += base_norms[name]
    return (change / base) ** 0.5 if base else None


def singular_values(a: Tensor, b: Tensor) -> Tensor:
    """The singular values of B @ A, at most R, by two small QRs, not the product. a: [R, ...], b: [M, R, ...]."""
    a_RN, b_MR = a.detach().float().cpu().flatten(1), b.detach().float().cpu().flatten(1)
    values: Tensor = torch.linalg.svdvals(torch.linalg.qr(b_MR).R @ torch.linalg.qr(a_RN.T).R.T)
    return values


def effective_rank(singular_values_R: Tensor) -> float:
    """The number of equally large singular values that would have this entropy.

    >>> round(effective_rank(torch.ones(4)), 3)
    4.0
    """
    share_R = singular_values_R / singular_values_R.sum()
    return float(torch.exp(-(share_R * share_R.clamp(min=1e-12).log()).sum()))
