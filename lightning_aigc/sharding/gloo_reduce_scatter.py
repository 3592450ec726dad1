"""A reduce-scatter for gloo, which has none: its own is an all-reduce of a copy and sends twice the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GlooReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes. Each rank gets the others' parts of its shard and adds them.

    The sum begins with the lowest rank's part, so that it does not depend on which part comes first.
    Source of the interface: torch.distributed.fsdp, `Comm` and `ReduceScatter`.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write [N], the sum or mean over ranks of this rank's part of their inputs [K N]."""
        rank, ranks = group.rank(), group.size()
        parts = input_tensor.view(ranks, -1)
        others = [other for other in range(ranks) if other != rank]
        received = {other: torch.empty_like(output_tensor) for other in others}
        works = [dist.irecv(received[other], group=group, group_src=other) for other in others]
        works += [dist.isend(parts[other], group=group, group_dst=other) for other in others]
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()
        of_rank = received | {rank: parts[rank]}
        torch.add(of_rank[0], of_rank[1], out=output_tensor)
        for other in range(2, ranks):
            output_tensor += of_rank[other]
        if op == dist.ReduceOp.AVG:
            output_tensor /= ranks
        else:
            assert op == dist.ReduceOp.SUM, op
