"""Whether all ranks still hold the same parameters, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

PRIME = 2**31 - 1
"""Sums are kept modulo this: no power of two divides by it, so that no single bit drops out."""


class RanksDivergedError(RuntimeError):
    """The ranks' parameters are no longer the same: training on would train several models."""


@torch.no_grad()
def check_equal(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Compare the ranks' parameters. Collective: one number travels, and all of them only after a difference.

    Raises: RanksDivergedError on every rank, with the first parameter that differs and the ranks that hold odd ones.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    sums = torch.stack([bits_of(p) for _, p in parameters])
    total = (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum() % PRIME
    # One all_reduce finds both ends; int32, because HCCL has not always had int64.
    ends = torch.stack([total, PRIME - total]).to(torch.int32)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    highest, lowest = int(ends[0]), PRIME - int(ends[1])
    if highest == lowest:
        return
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, sums.tolist())
    for i, (name, _) in enumerate(parameters):
        here = [sums_of_rank[i] for sums_of_rank in of_ranks]
        if len(set(here)) > 1:
            common = max(set(here), key=here.count)
            odd = [rank for rank, value in enumerate(here) if value != common]
            raise RanksDivergedError(
                f"the ranks' parameters differ: {name} is the first, and rank(s) {', '.join(map(str, odd))} hold other "
                "values than the rest. Something changed them outside gradient sync (a callback on one rank alone, a "
                "parameter that DDP ignores, a faulty device); start again from the last checkpoint"
            )


def bits_of(tensor: Tensor) -> Tensor:
    """A number below 2^31 that any one changed bit of this tensor changes: the sum of its words as integers."""
    flat = tensor.detach().contiguous().view(-1)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(words).sum(dtype=torch.int64) % PRIME
