"""silu_mul on plain torch: exact, no worse than eager, gate and up kept as the views they are, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fakes import op_contract as contract
from fakes.op_contract import Case, kept_numbers
from lightning_aigc_kernels import silu_mul
from lightning_aigc_kernels.silu_mul import reference
from lightning_aigc_kernels.silu_mul.npu_kernel import joined_halves

OPS = ["silu_mul", "silu_mul_backward"]
SHAPES = [(2,), (5, 6), (2, 5, 14), (2, 3, 2, 4), (1, 1, 1)]


def case(shape: tuple[int, ...] = (2, 5, 14), trained: tuple[str, ...] = ("gate", "up")) -> Case:
    gate, up = torch.randn((2, *shape), dtype=torch.float64) * 3
    return Case(silu_mul, reference.silu_mul, {"gate": gate, "up": up}, trained)


def halves(shape: tuple[int, ...] = (2, 5, 14), before: int = 0) -> Case:
    """Gate and up as halves of the end of a wider projection."""
    given = case(shape)
    projection = torch.randn((*shape[:-1], before + 2 * shape[-1]), dtype=torch.float64)
    given.tensors["gate"], given.tensors["up"] = projection[..., before:].chunk(2, dim=-1)
    return given


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_equal_autograd(shape: tuple[int, ...]) -> None:
    contract.assert_equals_autograd(case(shape))


@pytest.mark.parametrize("name", ["gate", "up"])
def test_each_gradient_alone_equals_autograd(name: str) -> None:
    contract.assert_equals_autograd(case(trained=(name,)))


def test_the_gradient_of_a_projection_cut_in_halves_equals_autograd() -> None:
    def of(op: object) -> object:
        return lambda projection: op(*projection[..., 6:].chunk(2, dim=-1))  # type: ignore[operator]

    projection = torch.randn(2, 5, 26, dtype=torch.float64)
    given = Case(of(silu_mul), of(reference.silu_mul), {"projection": projection}, ("projection",))  # type: ignore[arg-type]
    contract.assert_equals_autograd(given)


def test_finite_differences_agree() -> None:
    contract.assert_passes_gradcheck(case())


@pytest.mark.parametrize("before", [None, 0, 6])
def test_it_honours_the_op_contract(before: int | None) -> None:
    contract.assert_honours_the_op_contract(case() if before is None else halves(before=before), OPS)


@pytest.mark.parametrize("name", ["gate", "up"])
def test_it_honours_the_op_contract_with_one_gradient(name: str) -> None:
    contract.assert_honours_the_op_contract(case(trained=(name,)), OPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype) -> None:
    contract.assert_no_worse_than_eager(lambda: case((4, 33, 64)), dtype, 1.05)


def test_autocast_leaves_the_dtype_alone() -> None:
    gate = torch.randn(3, 8)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert silu_mul(gate, gate).dtype == torch.float32
        assert silu_mul(gate.bfloat16(), gate.bfloat16()).dtype == torch.bfloat16


def test_it_keeps_gate_and_up_alone() -> None:
    given = case((4, 16, 64))
    assert kept_numbers(given, given.fused, torch.float32) == 0
    assert kept_numbers(given, given.eager, torch.float32) >= 4 * 16 * 64


def test_it_keeps_views_of_a_projection_and_no_copies() -> None:
    projection = torch.randn(2, 5, 28, requires_grad=True)
    gate, up = projection.chunk(2, dim=-1)
    product = silu_mul(gate, up)
    assert product.grad_fn is not None
    saved = product.grad_fn.saved_tensors  # type: ignore[attr-defined]
    assert [tensor.data_ptr() for tensor in saved] == [gate.data_ptr(), up.data_ptr()]


def test_up_is_kept_only_if_the_gate_is_trained() -> None:
    gate, up = torch.randn(2, 5), torch.randn(2, 5, requires_grad=True)
    product = silu_mul(gate, up)
    assert product.grad_fn is not None
    kept_gate, kept_up = product.grad_fn.saved_tensors  # type: ignore[attr-defined]
    assert kept_gate.data_ptr() == gate.data_ptr() and kept_up is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_strides_give_the_same(shape: tuple[int, ...]) -> None:
    contract.assert_takes_any_strides(case(shape))


@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6), (3, 5, 0)], ids=str)
def test_an_empty_input_gives_empty_results(shape: tuple[int, ...]) -> None:
    contract.assert_equals_autograd(case(shape))


@pytest.mark.parametrize("name", ["gate", "up"])
def test_nan_comes_out(name: str) -> None:
    result = contract.assert_shows_nan(case(), name, (1, 2, 3))
    assert result["y"].isnan().sum() == 1


def test_what_it_gives_can_be_changed_in_place() -> None:
    contract.assert_can_be_changed_in_place(case())


def test_it_works_without_gradients() -> None:
    contract.assert_right_without_gradients(case())


def test_it_refuses_what_it_has_no_rules_for() -> None:
    contract.assert_refuses_what_it_has_no_rules_for(case(), "silu_mul", "gate")


def test_it_compiles() -> None:
    contract.assert_compiles(case())


def test_tensors_of_two_shapes_or_dtypes_are_named() -> None:
    gate = torch.randn(2, 4)
    wanted = r"gate and up must have one shape and dtype, got \(2, 4\) in torch.float32 and "
    with pytest.raises(ValueError, match=wanted + r"\(2, 1\) in torch.float32"):
        silu_mul(gate, gate[:, :1])
    with pytest.raises(ValueError, match=wanted + r"\(2, 4\) in torch.bfloat16"):
        silu_mul(gate, gate.bfloat16())


def test_halves_of_a_contiguous_projection_are_joined_again_and_others_are_not() -> None:
    projection = torch.randn(2, 5, 28)
    gate, up = projection.chunk(2, dim=-1)
    joined = joined_halves(gate, up)
    assert joined is not None
    assert joined.data_ptr() == projection.data_ptr() and torch.equal(joined, projection)
    assert joined_halves(up, gate) is None
    assert joined_halves(gate, up.clone()) is None
    assert joined_halves(*torch.randn(2, 5, 30)[..., 2:].chunk(2, dim=-1)) is None
    assert joined_halves(*torch.randn(2, 7, 28)[:, :5].chunk(2, dim=-1)) is None
