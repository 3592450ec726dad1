"""LayerNorm and gated feed-forward as one op: exact, as near as eager, its input alone kept, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import op_contract as contract
from fakes.op_contract import Case, kept_numbers, outcome
from lightning_aigc_kernels import LoRAProjection, NormParameters, feed_forward
from lightning_aigc_kernels.feed_forward import feed_forward_reference

EPS, SCALES = 1e-5, (0.5, 2.0)
OPS = ["feed_forward", "feed_forward_backward"]
FEATURES, INNER, RANK = 8, 12, 3
SIZES: dict[str, tuple[int, ...]] = {
    "norm_weight": (FEATURES,),
    "norm_bias": (FEATURES,),
    "weight1": (2 * INNER, FEATURES),
    "bias1": (2 * INNER,),
    "down1": (RANK, FEATURES),
    "up1": (2 * INNER, RANK),
    "weight2": (FEATURES + 2, INNER),
    "bias2": (FEATURES + 2,),
    "down2": (RANK, INNER),
    "up2": (FEATURES + 2, RANK),
}
LORA1, LORA2 = ("down1", "up1"), ("down2", "up2")
TRAINED = {
    "all": ("x", *SIZES),
    "frozen": ("x",),
    "lora": ("x", *LORA1, *LORA2),
    "first lora": LORA1,
    "second layer": ("x", "weight2", "bias2"),
    "norm": ("norm_weight", "norm_bias"),
    "one of a pair": ("x", "up1", "down2", "bias1", "norm_bias"),
}


def call(op: Any, x: Tensor, normed: bool = True, **given: Any) -> Tensor:
    """The op, or its reference, on tensors by name."""
    tensors = {name: given.pop(name, None) for name in SIZES}
    norm = NormParameters(tensors["norm_weight"], tensors["norm_bias"], EPS, normed)
    layers = [
        LoRAProjection(*(tensors[f"{name}{i}"] for name in ("weight", "bias", "down", "up")), scale)
        for i, scale in enumerate(SCALES, 1)
    ]
    y: Tensor = op(x, norm, *layers, **given)
    return y


fused, eager = partial(call, feed_forward), partial(call, feed_forward_reference)


def case(
    trained: str = "all", absent: tuple[str, ...] = (), shape: tuple[int, ...] = (2, 5, FEATURES), **how: Any
) -> Case:
    """Keyword arguments go to both sides, those that only the op knows in `op_only`."""
    op_only = how.pop("op_only", {})
    tensors: dict[str, Tensor | None] = {"x": torch.randn(shape, dtype=torch.float64)}
    for name, size in SIZES.items():
        if name not in absent:
            tensors[name] = torch.randn(size, dtype=torch.float64) / size[-1] ** 0.5
    chosen = tuple(name for name in TRAINED[trained] if name not in absent)
    return Case(partial(fused, **how, **op_only), partial(eager, **how), tensors, chosen)


@pytest.mark.parametrize("keep", [False, True], ids=["input kept", "projection kept"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("trained", TRAINED)
def test_output_and_gradients_equal_autograd(trained: str, activation: str, keep: bool) -> None:
    contract.assert_equals_autograd(case(trained, activation=activation, op_only={"keep_projection": keep}))


@pytest.mark.parametrize("trained", ["all", "frozen"])
@pytest.mark.parametrize(
    "absent",
    [LORA1, LORA2, (*LORA1, *LORA2), ("bias1", "bias2"), ("norm_bias",), ("norm_weight", "norm_bias")],
    ids=str,
)
def test_absent_parameters_are_left_out(absent: tuple[str, ...], trained: str) -> None:
    contract.assert_equals_autograd(case(trained, absent))


def test_a_feed_forward_without_norm_passes_its_input_on() -> None:
    contract.assert_equals_autograd(case(absent=("norm_weight", "norm_bias"), normed=False))


@pytest.mark.parametrize("shape", [(FEATURES,), (7, FEATURES), (2, 3, 2, FEATURES)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    contract.assert_equals_autograd(case(shape=shape))


def test_finite_differences_agree() -> None:
    contract.assert_passes_gradcheck(case())


@pytest.mark.parametrize("keep", [False, True], ids=["input kept", "projection kept"])
@pytest.mark.parametrize("trained", ["all", "lora"])
def test_it_honours_the_op_contract(trained: str, keep: bool) -> None:
    contract.assert_honours_the_op_contract(case(trained, op_only={"keep_projection": keep}), OPS, dynamic=False)


@pytest.mark.parametrize("keep", [False, True], ids=["input kept", "projection kept"])
@pytest.mark.parametrize("trained", ["all", pytest.param("lora", marks=pytest.mark.long)])
def test_it_honours_the_op_contract_with_symbolic_shapes(trained: str, keep: bool) -> None:
    contract.assert_honours_the_op_contract(case(trained, op_only={"keep_projection": keep}), OPS)


RATIO = 1.5  # measured: 1.12


@pytest.mark.parametrize("keep", [False, True], ids=["input kept", "projection kept"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype, keep: bool) -> None:
    contract.assert_no_worse_than_eager(
        lambda: case(shape=(4, 33, FEATURES), op_only={"keep_projection": keep}), dtype, RATIO
    )


@pytest.mark.parametrize("keep", [False, True], ids=["input kept", "projection kept"])
def test_under_autocast_it_is_no_worse_than_eager(keep: bool) -> None:
    contract.assert_no_worse_than_eager(
        lambda: case(shape=(4, 33, FEATURES), op_only={"keep_projection": keep}), torch.float32, RATIO, torch.bfloat16
    )


@pytest.mark.parametrize("trained", ["lora", "all"])
def test_it_keeps_its_input_alone(trained: str) -> None:
    given = case(trained, shape=(2, 64, FEATURES))
    tokens = 2 * 64
    assert kept_numbers(given, given.fused, torch.float32) == 0
    assert kept_numbers(given, given.eager, torch.float32) >= tokens * (FEATURES + 4 * INNER)
    with_projection = partial(given.fused, keep_projection=True)
    assert kept_numbers(given, with_projection, torch.float32) == tokens * 2 * INNER
    # Under autocast no copy of a weight either, and the projection in autocast's dtype.
    assert kept_numbers(given, given.fused, torch.float32, torch.bfloat16) == 0
    assert kept_numbers(given, with_projection, torch.float32, torch.bfloat16) == tokens * INNER


def test_backward_may_run_in_another_dtype() -> None:
    """Its products do; the output's bits and every dtype stay."""
    given = case()
    same, narrow = outcome(given, given.fused), outcome(given, partial(given.fused, grad_dtype=torch.float32))
    assert torch.equal(narrow["y"], same["y"])
    for name in ("up2", "down1", "weight1", "x"):
        assert narrow[name].dtype == torch.float64
        error = (narrow[name] - same[name]).norm() / same[name].norm()
        assert 1e-10 < error < 1e-5, name


def test_a_repeated_forward_may_skip_the_product() -> None:
    given = case()
    whole = outcome(given, given.fused)
    for keep in (False, True):
        again = partial(given.fused, skip_product=True, keep_projection=keep)
        skipped = outcome(given, again)
        y = skipped.pop("y")
        assert y.shape == whole["y"].shape and y.dtype == whole["y"].dtype
        assert all(torch.equal(gradient, whole[name]) for name, gradient in skipped.items())
        assert kept_numbers(given, again, torch.float64) == 0


def test_any_strides_give_the_same() -> None:
    contract.assert_takes_any_strides(case())


@pytest.mark.parametrize("keep", [False, True], ids=["input kept", "projection kept"])
@pytest.mark.parametrize("shape", [(0, 5, FEATURES), (2, 0, FEATURES), (0, FEATURES)], ids=str)
def test_an_empty_batch_gives_empty_results(shape: tuple[int, ...], keep: bool) -> None:
    contract.assert_equals_autograd(case(shape=shape, op_only={"keep_projection": keep}))


@pytest.mark.parametrize("keep", [False, True], ids=["input kept", "projection kept"])
def test_nan_comes_out(keep: bool) -> None:
    given = case(op_only={"keep_projection": keep})
    contract.assert_shows_nan(given, "x", (1, 2, 3))
    contract.assert_shows_nan(given, "up1", (1, 1))


@pytest.mark.parametrize("keep", [False, True], ids=["input kept", "projection kept"])
def test_what_it_gives_can_be_changed_in_place(keep: bool) -> None:
    contract.assert_can_be_changed_in_place(case(op_only={"keep_projection": keep}))


def test_it_works_without_gradients() -> None:
    contract.assert_right_without_gradients(case())


def test_it_refuses_what_it_has_no_rules_for() -> None:
    contract.assert_refuses_what_it_has_no_rules_for(case(), "feed_forward")


@pytest.mark.parametrize("keep", [False, True], ids=["input kept", "projection kept"])
def test_it_compiles(keep: bool) -> None:
    contract.assert_compiles(case("lora", op_only={"keep_projection": keep}))


def test_one_dtype_for_two_calls_gives_equal_bits() -> None:
    given = case("lora")
    contract.assert_same(outcome(given, given.fused), outcome(given, given.fused), eps=0)
