"""Reduce-scatter for gloo, whose own is an all-reduce of a copy and sends twice the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SummedParts:
    """Parts of all ranks that travel to this rank, and are added when it waits for them.

    The sum begins with the lowest rank's part, so that it does not depend on the order of arrival.
    """

    def __init__(self, out_N: Tensor, parts_KN: Tensor, group: Any) -> None:
        """Start to send each of K ranks its part, and to receive theirs; `wait` writes their sum to out_N."""
        self._out_N = out_N
        rank = dist.get_rank(group)
        others = [other for other in range(len(parts_KN)) if other != rank]
        received = {other: torch.empty_like(out_N) for other in others}
        self._of_rank = received | {rank: parts_KN[rank]}
        self._works = [dist.irecv(received[other], group=group, group_src=other) for other in others]
        self._works += [dist.isend(parts_KN[other], group=group, group_dst=other) for other in others]

    def wait(self) -> None:
        """Wait for the parts, and add them."""
        for work in self._works:
            assert work is not None  # this rank is in the group
            work.wait()
        torch.add(self._of_rank[0], self._of_rank[1], out=self._out_N)
        for other in range(2, len(self._of_rank)):
            self._out_N += self._of_rank[other]


class GlooReduceScatter:
    """Argument of `FSDPModule.set_custom_reduce_scatter`.

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
        """Write [N]: the sum or mean over ranks of this rank's part of their inputs [K N]."""
        ranks = group.size()
        SummedParts(output_tensor, input_tensor.view(ranks, -1), group).wait()
        if op == dist.ReduceOp.AVG:
            output_tensor /= ranks
        else:
            assert op == dist.ReduceOp.SUM, op
