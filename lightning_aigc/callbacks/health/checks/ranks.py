"""Weights that differ between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_aigc.callbacks.health.alerts.alert_log import is_single_rank
from lightning_aigc.callbacks.health.alerts.alerts import Finding
from lightning_aigc.checkpoint.resume import resume_command
from lightning_aigc.gradient_sync.watch.replica_check import bits_of, first_difference

RANK_DIVERGENCE = "rank_divergence"


@torch.no_grad()
def check_ranks(names: Sequence[str], rows_PS: Tensor) -> list[Finding]:
    """Find the first parameter whose sampled values differ between ranks.

    Collective: one number is sent, and one for each row after a difference.
    """
    if is_single_rank():
        return []
    different = first_difference(bits_of(rows_PS, by_row=True))
    if different is None:
        return []
    place, odd = different
    return [
        Finding(
            RANK_DIVERGENCE,
            names[place],
            "error",
            f"rank(s) {', '.join(map(str, odd))} hold other values than the rest; it is the first that differs",
            "something changed weights on one rank alone: a callback, a parameter that DDP ignores, a device",
            f"stop, and give every rank the weights of the newest snapshot: {resume_command()}",
        )
    ]
