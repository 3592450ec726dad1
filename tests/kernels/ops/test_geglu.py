"""geglu and swiglu on plain torch: exact, as near as eager, the projection alone kept, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fakes import op_contract as contract
from fakes.op_contract import Case, kept_numbers
from lightning_aigc_kernels import geglu, swiglu
from lightning_aigc_kernels.geglu import reference

OPS = ["geglu", "geglu_backward"]


PAIRS = {"geglu": (geglu, reference.geglu), "swiglu": (swiglu, reference.swiglu)}
both = pytest.mark.parametrize("op", PAIRS)


def case(op: str, shape: tuple[int, ...] = (2, 5, 14)) -> Case:
    return Case(*PAIRS[op], {"projected": torch.randn(shape, dtype=torch.float64) * 3}, ("projected",))


@both
@pytest.mark.parametrize("shape", [(2,), (5, 6), (2, 5, 14), (2, 3, 2, 4), (1, 1, 2)], ids=str)
def test_output_and_gradient_equal_autograd(op: str, shape: tuple[int, ...]) -> None:
    contract.assert_equals_autograd(case(op, shape))


@both
def test_finite_differences_agree(op: str) -> None:
    contract.assert_passes_gradcheck(case(op))


@both
def test_it_honours_the_op_contract(op: str) -> None:
    contract.assert_honours_the_op_contract(case(op), OPS)


@both
def test_it_honours_the_op_contract_for_scattered_input(op: str) -> None:
    given = case(op)
    projected = given.tensors["projected"]
    assert projected is not None
    given.tensors["projected"] = projected.transpose(0, 1)
    contract.assert_honours_the_op_contract(given, OPS)


RATIO = 1.5  # measured: 1.26, float32; a CPU's gelu of a contiguous gate is another than of a strided one


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype, op: str) -> None:
    contract.assert_no_worse_than_eager(lambda: case(op, (4, 33, 64)), dtype, RATIO)


@both
def test_autocast_leaves_the_dtype_alone(op: str) -> None:
    """The same as torch's own gelu and silu: the projection before it chose the dtype."""
    projected = torch.randn(3, 8)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert PAIRS[op][0](projected).dtype == PAIRS[op][1](projected).dtype == torch.float32
        assert PAIRS[op][0](projected.bfloat16()).dtype == torch.bfloat16


@both
def test_it_keeps_the_projection_alone(op: str) -> None:
    given = case(op, (4, 16, 64))
    assert kept_numbers(given, given.fused, torch.float32) == 0
    assert kept_numbers(given, given.eager, torch.float32) >= 4 * 16 * 32


@both
@pytest.mark.parametrize("shape", [(2, 5, 14), (5, 6)], ids=str)
def test_any_strides_give_the_same(op: str, shape: tuple[int, ...]) -> None:
    contract.assert_takes_any_strides(case(op, shape))


@both
@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6), (3, 5, 0)], ids=str)
def test_an_empty_input_gives_empty_results(op: str, shape: tuple[int, ...]) -> None:
    contract.assert_equals_autograd(case(op, shape))


@both
@pytest.mark.parametrize("feature", [0, 13], ids=["value", "gate"])
def test_nan_comes_out(op: str, feature: int) -> None:
    result = contract.assert_shows_nan(case(op), "projected", (1, 2, feature))
    assert result["y"].isnan().sum() == 1


@both
def test_what_it_gives_can_be_changed_in_place(op: str) -> None:
    contract.assert_can_be_changed_in_place(case(op))


@both
def test_it_works_without_gradients(op: str) -> None:
    contract.assert_right_without_gradients(case(op))


@both
def test_it_refuses_what_it_has_no_rules_for(op: str) -> None:
    contract.assert_refuses_what_it_has_no_rules_for(case(op), op, "projected")


@both
def test_it_compiles(op: str) -> None:
    contract.assert_compiles(case(op))


def test_an_odd_projection_is_named() -> None:
    wanted = r"the projection must be \[..., 2 D\], values then gates, got "
    with pytest.raises(ValueError, match=wanted + r"\(2, 5\)"):
        geglu(torch.randn(2, 5))
    with pytest.raises(ValueError, match=wanted + r"\(\)"):
        swiglu(torch.tensor(1.0))
