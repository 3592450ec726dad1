"""How one flat vector is added up over the ranks: exact, in bfloat16, or in few-bit integers.

A reduction is a generator: it yields each collective it has started and goes on when that is done, so that whoever
drives several of them decides what runs meanwhile. It is given e, this rank's share of the mean gradient with what it
still owes, and returns the sum over the ranks, the same bits everywhere, with a number that is finite when the sum is.
What it did not send stays in e: the sum of all e before equals the result plus the sum of all e after.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_aigc.gradient_sync.block_integers import BlockIntegers
from lightning_aigc.gradient_sync.layout import Unit
from lightning_aigc.gradient_sync.traffic import CountedGroup

Reducing = Generator[Any, None, tuple[Tensor, Tensor]]


class Reduction(Protocol):
    """One mode. Its state, if it has any, changes at `commit` alone, when the whole step was finite."""

    def reduce(self, unit: Unit, e_N: Tensor, group: CountedGroup) -> Reducing: ...

    def observe(self, unit: Unit, total_N: Tensor) -> None:
        """A sum that was sent whole, in a step of warm-up."""

    def commit(self) -> None: ...

    def forget(self) -> None:
        """The step was not finite."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Stateless:
    """What a reduction without a state of its own has in place of one."""

    def observe(self, unit: Unit, total_N: Tensor) -> None:
        pass

    def commit(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Whole(Stateless):
    """Everything, in float32."""

    def reduce(self, unit: Unit, e_N: Tensor, group: CountedGroup) -> Reducing:
        total = e_N.clone()
        yield group.all_reduce(total, _kind(unit))
        e_N.zero_()
        return total, total.sum()


class BFloat16(Stateless):
    """Everything, in bfloat16; partial sums round to it as well, and those roundings are lost."""

    def reduce(self, unit: Unit, e_N: Tensor, group: CountedGroup) -> Reducing:
        total = yield from in_bfloat16(e_N, group)
        return total.float(), total.sum(dtype=torch.float32)


class Integers(Stateless):
    """Blocks of few-bit integers in two hops, both with error feedback."""

    def __init__(self, bits: int) -> None:
        self.code = BlockIntegers(bits)

    def reduce(self, unit: Unit, e_N: Tensor, group: CountedGroup) -> Reducing:
        result = yield from in_two_hops(e_N, self.code, group)
        return result


def in_bfloat16(e_N: Tensor, group: CountedGroup) -> Generator[Any, None, Tensor]:
    """The sum in bfloat16; what rounding cost stays in e_N."""
    wire = e_N.bfloat16()
    e_N.sub_(wire)
    yield group.all_reduce(wire)
    return wire


def in_two_hops(e_N: Tensor, code: BlockIntegers, group: CountedGroup) -> Reducing:
    """Each rank adds up one part of the vector, which all send it packed, and sends the sum, packed anew.

    A rank's own part is not packed on its way to itself: there e_N takes what the second hop leaves, and so one vector
    holds what either hop still owes. N must divide by the group's size times `code.multiple`.
    """
    e_RN = e_N.view(group.size, -1)
    nbytes = code.wire_bytes(e_RN.shape[1])
    out_RB, received_RB = (torch.empty(group.size, nbytes, dtype=torch.uint8, device=e_N.device) for _ in range(2))
    others = [slice(0, group.rank), slice(group.rank + 1, group.size)]
    for rows in others:
        code.encode_(e_RN[rows], out_RB[rows])
    yield group.all_to_all(received_RB.view(-1), out_RB.view(-1))  # what is there for oneself no one reads

    mine_1N = e_RN[group.rank : group.rank + 1]
    for rows in others:
        code.add_rows_(received_RB[rows], mine_1N[0])
    sum_1B = torch.empty(1, nbytes, dtype=torch.uint8, device=e_N.device)
    code.encode_(mine_1N, sum_1B)
    yield group.all_gather(received_RB.view(-1), sum_1B.view(-1))

    total_RN = torch.empty_like(e_RN)
    check = code.decode(received_RB, total_RN)
    return total_RN.view(-1), check


def _kind(unit: Unit) -> str:
    if not unit.whole:
        return "values"
    return "protected" if unit.protected else "small"
