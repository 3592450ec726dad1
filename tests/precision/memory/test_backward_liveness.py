"""Products of a block that backward reads; a recomputation leaves out the others without changing a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_aigc.precision.block_options import UNLIMITED, SaveLimit
from lightning_aigc.precision.memory.liveness import BackwardReads
from lightning_aigc.precision.memory.profile import LastRunProfile
from lightning_aigc.precision.memory.selective import kind_of, results_within, save_and_reuse

FROZEN = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0)).double()


def adapted(x: Tensor, trained: Tensor) -> Tensor:
    """Products 0 and 1 are a layer with its adapter, 2 feeds a gelu, 3 only a sum."""
    x = x @ FROZEN[0] + x @ trained
    return x + torch.nn.functional.gelu(x @ FROZEN[1]) @ FROZEN[2]


class Products(TorchDispatchMode):
    """Counts the matrix products that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += kind_of(func) == "product"
        return func(*args, **(kwargs or {}))


def reads_of(block: Callable[..., Tensor], *inputs: Tensor) -> list[bool]:
    contexts = save_and_reuse(SaveLimit(), last_run := LastRunProfile())
    checkpoint(block, *inputs, use_reentrant=False, context_fn=lambda: contexts).sum()
    return [result.is_read for result in last_run.results]


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 8).double(), torch.randn(8, 8).double().requires_grad_()


def test_a_product_that_only_enters_a_sum_is_not_read(inputs: tuple[Tensor, Tensor]) -> None:
    assert reads_of(adapted, *inputs) == [True, True, True, False]


def test_a_product_behind_views_and_writes_in_place_is_read(inputs: tuple[Tensor, Tensor]) -> None:
    def block(x: Tensor, trained: Tensor) -> Tensor:
        y = torch.empty(2, 4, 8, dtype=x.dtype)
        y[0], y[1] = x @ FROZEN[0], x @ FROZEN[1]
        z = (y.transpose(0, 1).reshape(8, 8) @ trained).relu_()
        return z + x.repeat(2, 1) @ FROZEN[2]

    assert reads_of(block, *inputs) == [True, True, True, False]


def test_a_value_that_python_reads_counts_as_read(inputs: tuple[Tensor, Tensor]) -> None:
    def block(x: Tensor, trained: Tensor) -> Tensor:
        scale = 2.0 if (x @ FROZEN[0]).sum().item() > 0 else 3.0
        return scale * (x @ trained)

    assert reads_of(block, *inputs)[0]


def test_the_recomputation_leaves_out_what_is_not_read_and_no_gradient_changes(inputs: tuple[Tensor, Tensor]) -> None:
    def block(x: Tensor, trained: Tensor) -> Tensor:
        only_added = x @ FROZEN[0]
        return only_added + adapted(x, trained)  # torch's checkpoint runs again up to the last tensor that it needs

    counts = []
    gradients = []
    for contexts in (None, save_and_reuse(SaveLimit(), LastRunProfile())):
        given: Any = {} if contexts is None else {"context_fn": lambda found=contexts: found}
        output = checkpoint(block, *inputs, use_reentrant=False, **given)
        with Products() as counter:
            gradients += torch.autograd.grad(output.square().sum(), inputs[1])
        counts.append(counter.count)
    assert torch.equal(*gradients)
    assert counts[1] == counts[0] - 1


def test_storages_outside_the_block_may_be_read_by_anyone() -> None:
    outside, reads = torch.zeros(2), BackwardReads()
    result = torch.ones(2)
    reads.follow(torch.ops.aten.mm.default, (torch.ones(2), torch.ones(2)), {}, result, 0)
    assert not reads.is_read(0)
    reads.follow(torch.ops.aten.add_.Tensor, (outside, result), {}, outside, None)
    assert reads.is_read(0)


def test_the_results_that_cost_most_for_their_bytes_are_saved_first(inputs: tuple[Tensor, Tensor]) -> None:
    last_run = LastRunProfile()
    wide, narrow = torch.randn(8, 64).double(), torch.randn(64, 8).double()

    def block(x: Tensor, trained: Tensor) -> Tensor:
        return ((x @ trained).relu() @ wide).relu() @ narrow.requires_grad_()

    contexts = save_and_reuse(SaveLimit(UNLIMITED), last_run)
    checkpoint(block, *inputs, use_reentrant=False, context_fn=lambda: contexts).square().sum().backward()
    first, second, third = last_run.results
    assert (first.inner_dim, second.inner_dim, third.inner_dim) == (8, 8, 64)
    assert results_within(SaveLimit(UNLIMITED), last_run, 0) == {
        i for i, result in enumerate(last_run.results) if result.is_read
    }
    assert results_within(SaveLimit(first.nbytes), last_run, 0) == ({2} if third.is_read else {0})
    assert (
        results_within(SaveLimit(0), last_run, 0)
        == results_within(SaveLimit(UNLIMITED, share=0.0), last_run, 0)
        == frozenset()
    )
