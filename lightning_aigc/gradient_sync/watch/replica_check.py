"""Check that all ranks hold the same parameters, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

PRIME = 2**31 - 1
"""Sums are taken modulo this prime: no power of two divides by it, so that no single bit drops out."""


class RanksDivergedError(RuntimeError):
    """The ranks' parameters are no longer the same: training on would train several models."""


@torch.no_grad()
def check_equal(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Compare the ranks' parameters. Collective: one number travels, and all of them only after a difference.

    Raises: RanksDivergedError on every rank, with the first parameter that differs and the ranks that hold odd ones.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    different = first_difference(torch.stack([bits_of(p) for _, p in parameters]))
    if different is not None:
        place, odd = different
        raise RanksDivergedError(
            f"the ranks' parameters differ: {parameters[place][0]} is the first, and rank(s) "
            f"{', '.join(map(str, odd))} hold other values than the rest. Something changed them outside gradient sync "
            "(a callback on one rank alone, a parameter that DDP ignores, a faulty device); start again from the last "
            "checkpoint"
        )


def first_difference(sums_N: Tensor, group: Any = None) -> tuple[int, list[int]] | None:
    """Return the place of the first of these `bits_of` that differs between ranks, and the ranks in the minority.

    Collective: one number travels, and all of them only after a difference.
    """
    total = (sums_N * torch.arange(1, len(sums_N) + 1, device=sums_N.device)).sum() % PRIME
    # One all_reduce finds both ends; int32, because HCCL has not always had int64.
    ends = torch.stack([total, PRIME - total]).to(torch.int32)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    if int(ends[0]) == PRIME - int(ends[1]):
        return None
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, sums_N.cpu().tolist(), group=group)
    for place, here in enumerate(zip(*of_ranks, strict=True)):
        if len(set(here)) > 1:
            common = max(set(here), key=here.count)
            return place, [rank for rank, value in enumerate(here) if value != common]
    return None


def bits_of(tensor: Tensor, *, by_row: bool = False) -> Tensor:
    """Return the sum of the tensor's words, or of each row's: a number below 2^31 that any changed bit changes."""
    flat = tensor.detach().contiguous()
    flat = flat.flatten(1) if by_row else flat.view(-1)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(words).sum(-1, dtype=torch.int64) % PRIME
