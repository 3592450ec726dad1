"""How many of a LoRA's directions carry its change: the effective rank of B @ A.

Legend: R rank of the LoRA.
Source: effective rank, the exponential of the entropy of the singular values, Roy and Vetterli, EUSIPCO 2007.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def effective_ranks(model: nn.Module) -> dict[str, tuple[int, float]]:
    """(rank, effective rank) of each LoRA layer of peft whose change is finite and not zero."""
    found = {}
    for name, module in model.named_modules():
        matrices = getattr(module, "lora_A", None)
        if isinstance(matrices, nn.ModuleDict) and len(matrices):
            adapter = next(iter(matrices))
            a: Tensor = matrices[adapter].weight  # type: ignore[assignment]
            b: Tensor = module.lora_B[adapter].weight
            if not (a.isfinite().all() and b.isfinite().all()):
                continue
            values_R = singular_values(a, b)
            if values_R.sum() > 0:
                found[name] = (len(a), effective_rank(values_R))
    return found


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
