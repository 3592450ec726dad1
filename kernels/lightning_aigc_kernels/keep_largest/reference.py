"""Keep the largest magnitudes of each row, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def keep_largest(rows_RL: Tensor, density: float) -> Tensor:
    """Keep each row's ceil(density * L) largest magnitudes, ties included, and zero the rest.

    NaN counts as infinite: it is kept, and stays NaN.
    """
    if rows_RL.numel() == 0 or density == 1:
        return rows_RL.clone()
    length = rows_RL.shape[1]
    wide = torch.promote_types(rows_RL.dtype, torch.float32)  # kthvalue has no half precision on a CPU
    magnitude_RL = rows_RL.abs().to(wide).nan_to_num_(nan=math.inf, posinf=math.inf)
    smallest_kept = length - math.ceil(density * length) + 1
    threshold_R1 = torch.kthvalue(magnitude_RL, smallest_kept, dim=1, keepdim=True).values
    return torch.where(magnitude_RL >= threshold_R1, rows_RL, 0.0)
