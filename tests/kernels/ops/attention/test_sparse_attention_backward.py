"""sparse_attention_backward: dense at density 1, the largest entries of each head below, and what is refused."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from fakes import op_contract as contract
from fakes.accuracy import largest_by_sorting
from fakes.op_contract import Case, outcome
from lightning_aigc_kernels import sparse_attention_backward
from lightning_aigc_kernels.sparse_attention_backward import sparse_attention_backward_reference

OPS = ["sparse_attention_backward", "sparse_attention_backward_backward"]
NAMES = ("q", "k", "v")
NEARLY_1 = 1 - 1e-9  # takes the op's own way, and drops nothing


def call(q: Tensor, k: Tensor, v: Tensor, density: float = NEARLY_1) -> Tensor:
    return sparse_attention_backward(q, k, v, density)


def eager(q: Tensor, k: Tensor, v: Tensor, density: float = 1.0) -> Tensor:
    return sparse_attention_backward_reference(q, k, v, density)


def case(
    density: float = NEARLY_1, queries: tuple[int, ...] = (2, 3, 5, 4), keys: int = 17, value_features: int = 4
) -> Case:
    shapes = (queries, (*queries[:2], keys, queries[3]), (*queries[:2], keys, value_features))
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in zip(NAMES, shapes, strict=True)}
    return Case(partial(call, density=density), eager, dict(tensors), NAMES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("density", [1.0, NEARLY_1])
def test_density_1_equals_the_dense_op_bit_for_bit(density: float, dtype: torch.dtype) -> None:
    given = case(density)
    ours, theirs = outcome(given, given.fused, dtype), outcome(given, eager, dtype)
    for name in theirs:
        contract.assert_same_bits(ours[name], theirs[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("density", [0.9, 0.5, 0.1, 1e-6])
def test_each_head_keeps_its_largest_gradients_and_nothing_else_changes(density: float, dtype: torch.dtype) -> None:
    given = case(density)
    sparse, dense = outcome(given, given.fused, dtype), outcome(given, eager, dtype)
    contract.assert_same_bits(sparse["y"], dense["y"])
    if sparse["y"].is_cuda:
        return  # other bits of two gradients can be the largest
    contract.assert_same(sparse, outcome(given, partial(eager, density=density), dtype), eps=0)
    for name in NAMES:
        heads = dense[name].flatten(2).flatten(0, 1)
        expected = largest_by_sorting(heads, density)
        assert torch.equal(sparse[name], expected.view(dense[name].shape))
        if dtype == torch.float64:  # no ties
            assert (expected != 0).sum(1).tolist() == [math.ceil(density * heads.shape[1])] * len(heads)


@pytest.mark.parametrize("trained", [("q",), ("v",), ("q", "k")], ids=str)
def test_any_subset_may_be_trained(trained: tuple[str, ...]) -> None:
    given = case()
    contract.assert_equals_autograd(Case(given.fused, given.eager, given.tensors, trained))


def test_values_may_be_wider_than_queries() -> None:
    contract.assert_equals_autograd(case(value_features=6))


def test_finite_differences_agree() -> None:
    contract.assert_passes_gradcheck(case())


@pytest.mark.parametrize("density", [NEARLY_1, 0.5])
def test_it_honours_the_op_contract(density: float) -> None:
    contract.assert_honours_the_op_contract(case(density), OPS)


RATIO = 1.1  # measured: 1.00, the kernel is eager's own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype) -> None:
    contract.assert_no_worse_than_eager(lambda: case(queries=(2, 3, 33, 8), value_features=8), dtype, RATIO)


def test_under_autocast_it_is_no_worse_than_eager() -> None:
    contract.assert_no_worse_than_eager(
        lambda: case(queries=(2, 3, 33, 8), value_features=8), torch.float32, RATIO, torch.bfloat16
    )


@pytest.mark.parametrize("density", [NEARLY_1, 0.5])
def test_any_strides_give_the_same(density: float) -> None:
    """Features that do not lie side by side once made the fused attention read other numbers."""
    contract.assert_takes_any_strides(case(density))


def test_an_expanded_gradient_gives_the_same() -> None:
    given = case()
    leaves = [given.tensors[name].clone().requires_grad_() for name in NAMES]  # type: ignore[union-attr]
    ours = torch.autograd.grad(call(*leaves).sum(), leaves)
    theirs = torch.autograd.grad(eager(*leaves).sum(), leaves)
    contract.assert_same(dict(zip(NAMES, ours, strict=True)), dict(zip(NAMES, theirs, strict=True)))


@pytest.mark.parametrize(
    ("queries", "keys"), [((0, 3, 5, 4), 7), ((2, 3, 0, 4), 7), ((2, 3, 5, 4), 0)], ids=["samples", "queries", "keys"]
)
@pytest.mark.parametrize("density", [NEARLY_1, 0.5])
def test_an_empty_input_gives_what_torch_gives(density: float, queries: tuple[int, ...], keys: int) -> None:
    contract.assert_equals_autograd(case(density, queries, keys))


@pytest.mark.parametrize("density", [1.0, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_nan_comes_out(name: str, density: float) -> None:
    given = case(density)
    poisoned = given.tensors[name]
    assert poisoned is not None
    poisoned[1, 2, 3, 1] = math.nan
    ours, theirs = outcome(given, given.fused), outcome(given, eager)
    assert all(torch.equal(ours[key].isnan(), theirs[key].isnan()) for key in theirs)
    assert ours["y"].isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_nan_comes_out_beside_few_keys_too(name: str) -> None:
    """torch 2.13's fused attention on a CPU hides a NaN query here."""
    result = contract.assert_shows_nan(case(0.5, keys=5), name, (1, 2, 3, 1))
    assert result["y"][1, 2].isnan().any()


def test_it_works_without_gradients() -> None:
    contract.assert_right_without_gradients(case(0.5))


def test_it_refuses_what_it_has_no_rules_for() -> None:
    contract.assert_refuses_what_it_has_no_rules_for(case(0.5), "sparse_attention_backward", "q")


def test_it_compiles() -> None:
    contract.assert_compiles(case(0.5))


def test_what_does_not_fit_is_named() -> None:
    q = torch.randn(2, 3, 5, 4)
    for density in (0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got .*; use 1 to keep every entry"):
            sparse_attention_backward(q, q, q, density)
    wanted = r"sparse_attention_backward wants q \[N, H, T, D\], k and v \[N, H, S, D\], got "
    for k, v in ((q[0], q[0]), (q[:1], q[:1]), (q[:, :1], q[:, :1]), (q[:, :, :3], q), (q[..., :3], q)):
        with pytest.raises(ValueError, match=wanted):
            sparse_attention_backward(q, k, v, 0.5)
    with pytest.raises(ValueError, match=r"of one dtype, got torch\.float32, torch\.float64, torch\.float32; use"):
        sparse_attention_backward(q, q.double(), q, 0.5)
