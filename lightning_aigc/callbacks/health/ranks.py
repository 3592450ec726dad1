"""What several ranks must agree on: their parameters, and what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_aigc.callbacks.health.alert import Alert, Finding
from lightning_aigc.gradient_sync.replica_check import bits_of, first_difference


def is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


@torch.no_grad()
def check_ranks(names: Sequence[str], rows_PS: Tensor) -> list[Finding]:
    """Whether all ranks hold the same sampled weights. Collective: one number, and one a row after a difference."""
    if is_alone():
        return []
    different = first_difference(bits_of(rows_PS, by_row=True))
    if different is None:
        return []
    place, odd = different
    return [
        Finding(
            "rank_divergence",
            names[place],
            "error",
            f"rank(s) {', '.join(map(str, odd))} hold other values than the rest; it is the first that differs",
            "something changed weights on one rank alone: a callback, a parameter that DDP ignores, a device",
            "lightning fit --ckpt_path last: train on from the last checkpoint",
        )
    ]


def share_alerts(own: Sequence[Alert]) -> list[Alert]:
    """Everybody's alerts, rank zero's first. Collective; one number travels where nobody has any."""
    if is_alone():
        return list(own)
    device = torch.device("cpu") if dist.get_backend() == "gloo" else _device()
    count = torch.tensor(float(len(own)), device=device)
    dist.all_reduce(count)
    if int(count) == 0:
        return []
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, list(own))
    return [alert for alerts in of_ranks for alert in alerts]


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None else accelerator
