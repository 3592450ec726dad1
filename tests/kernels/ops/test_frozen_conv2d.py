"""frozen_conv2d and frozen_linear: exact, as near as eager, nothing of the input kept, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from fakes import op_contract as contract
from fakes.op_contract import Case, as_one_picture, kept_numbers, outcome, outcome_of
from lightning_aigc_kernels import frozen_conv2d, frozen_linear

CONV_OPS = ["frozen_conv2d", "frozen_conv2d_backward"]
LINEAR_OPS = ["frozen_linear", "frozen_linear_backward"]
GEOMETRIES: dict[str, dict[str, Any]] = {
    "3x3": {"padding": (1, 1)},
    "1x1": {"kernel": 1},
    "no padding": {},
    "stride": {"stride": (2, 2), "padding": (1, 1)},
    "uneven": {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    "dilation": {"dilation": (2, 2), "padding": (2, 2)},
    "groups": {"groups": 2, "padding": (1, 1)},
}


def conv_case(geometry: str = "3x3", pixels: int = 7, bias: bool = True, batch: int = 2) -> Case:
    options = dict(GEOMETRIES[geometry])
    kernel, groups = options.pop("kernel", 3), options.get("groups", 1)
    tensors: dict[str, Tensor | None] = {
        "x": torch.randn(batch, 4, pixels, pixels + 2, dtype=torch.float64),
        "weight": torch.randn(6, 4 // groups, kernel, kernel, dtype=torch.float64),
        "bias": torch.randn(6, dtype=torch.float64) if bias else None,
    }
    return Case(partial(frozen_conv2d, **options), partial(torch.nn.functional.conv2d, **options), tensors, ("x",))


def linear_case(shape: tuple[int, ...] = (2, 5, 8), bias: bool = True) -> Case:
    tensors: dict[str, Tensor | None] = {
        "x": torch.randn(shape, dtype=torch.float64),
        "weight": torch.randn(6, 8, dtype=torch.float64),
        "bias": torch.randn(6, dtype=torch.float64) if bias else None,
    }
    return Case(frozen_linear, torch.nn.functional.linear, tensors, ("x",))


CASES = {"conv2d": (conv_case, CONV_OPS), "linear": (linear_case, LINEAR_OPS)}
both = pytest.mark.parametrize("op", CASES)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("pixels", [5, 2], ids=["many pixels", "few pixels"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_convolution_equals_autograd(geometry: str, pixels: int, bias: bool) -> None:
    if pixels == 2 and geometry in ("no padding", "uneven"):
        pixels = 3
    contract.assert_equals_autograd(conv_case(geometry, pixels, bias))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 5, 8), (2, 3, 5, 8)], ids=str)
def test_a_linear_layer_equals_autograd(shape: tuple[int, ...], bias: bool) -> None:
    contract.assert_equals_autograd(linear_case(shape, bias))


@both
def test_finite_differences_agree(op: str) -> None:
    contract.assert_passes_gradcheck(CASES[op][0]())


def conv_case_in(dtype: torch.dtype, geometry: str, pixels: int) -> Case:
    given = conv_case(geometry, pixels)
    tensors = {name: None if t is None else t.to(dtype) for name, t in given.tensors.items()}
    return Case(given.fused, given.eager, tensors, given.trained)


@pytest.mark.parametrize("pixels", [7, 2], ids=["many pixels", "few pixels"])
@pytest.mark.parametrize("geometry", ["3x3", "stride", "groups"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_convolution_honours_the_op_contract(geometry: str, pixels: int, dtype: torch.dtype) -> None:
    contract.assert_honours_the_op_contract(conv_case_in(dtype, geometry, pixels), CONV_OPS, dynamic=False)


@pytest.mark.parametrize("pixels", [7, 2], ids=["many pixels", "few pixels"])
@pytest.mark.parametrize(
    "geometry", ["3x3", *(pytest.param(name, marks=pytest.mark.long) for name in ("stride", "groups"))]
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.long), torch.float32], ids=str)
def test_a_convolution_honours_the_op_contract_with_symbolic_shapes(
    geometry: str, pixels: int, dtype: torch.dtype
) -> None:
    contract.assert_honours_the_op_contract(conv_case_in(dtype, geometry, pixels), CONV_OPS)


def test_a_linear_layer_honours_the_op_contract() -> None:
    contract.assert_honours_the_op_contract(linear_case(), LINEAR_OPS)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype, op: str) -> None:
    contract.assert_no_worse_than_eager(CASES[op][0], dtype, RATIO)


RATIO = 1.1  # measured: 1.00 at most, the products are eager's own


@both
def test_under_autocast_it_is_no_worse_than_eager(op: str) -> None:
    contract.assert_no_worse_than_eager(CASES[op][0], torch.float32, RATIO, torch.bfloat16)


@both
def test_under_autocast_a_half_precision_input_beside_a_float32_weight_is_served(op: str) -> None:
    given = CASES[op][0]()
    x, weight = given.tensors["x"], given.tensors["weight"]
    assert x is not None and weight is not None
    leaf = x.bfloat16().requires_grad_()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        y = given.fused(leaf, weight.float())
    assert y.dtype == torch.bfloat16
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    assert dx.dtype == torch.bfloat16 and dx.isfinite().all()


@both
def test_nothing_is_kept(op: str) -> None:
    given = CASES[op][0]()
    weight, x = given.tensors["weight"], given.tensors["x"]
    assert weight is not None and x is not None
    assert kept_numbers(given, given.fused, torch.float32) == 0
    # Nor autocast's copy of the weight, which torch's own keeps, and beside it a copy of a convolution's input.
    assert kept_numbers(given, given.fused, torch.float32, torch.bfloat16) == 0
    theirs = kept_numbers(given, given.eager, torch.float32, torch.bfloat16)
    assert theirs >= (weight.numel() + (x.numel() if op == "conv2d" else 0)) / 2


@both
def test_the_input_may_go_away(op: str) -> None:
    """Native convolution keeps an input that nobody else holds."""
    given = CASES[op][0]()
    leaf, weight = given.tensors["x"], given.tensors["weight"]
    assert leaf is not None and weight is not None
    for forward, kept in ((given.fused, False), (F.conv2d, True)):
        if op == "linear" and kept:
            continue
        x = leaf.clone().requires_grad_() * 2
        memory = StorageWeakRef(x.untyped_storage())
        y = forward(x, weight)
        del x
        assert memory.expired() is not kept
        y.sum().backward()


def test_the_input_gradient_reads_no_input_values(monkeypatch: pytest.MonkeyPatch) -> None:
    given = conv_case()
    expected = outcome(given, given.eager)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))
    contract.assert_same(outcome(given, given.fused), expected)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_repeated_forward_may_skip_the_product(geometry: str) -> None:
    given = conv_case(geometry, 5)
    whole, skipped = outcome(given, given.fused), outcome(given, partial(given.fused, skip_product=True))
    assert skipped["y"].shape == whole["y"].shape and skipped["y"].dtype == whole["y"].dtype
    contract.assert_same_bits(skipped["x"], whole["x"])


def test_a_skipped_product_is_in_autocasts_dtype() -> None:
    given = conv_case()
    result = outcome(given, partial(given.fused, skip_product=True), torch.float32, torch.bfloat16)
    assert result["y"].dtype == torch.bfloat16 and result["x"].dtype == torch.float32


@both
def test_any_strides_give_the_same(op: str) -> None:
    contract.assert_takes_any_strides(CASES[op][0]())


def test_a_batch_made_of_one_picture_is_taken_in_any_dtype() -> None:
    given = conv_case(batch=1)
    contract.assert_takes_any_strides(given)
    leaves = {n: None if t is None else as_one_picture(t).bfloat16() for n, t in given.tensors.items()}
    expected = outcome(given, given.fused, torch.bfloat16)
    contract.assert_same(outcome_of(given.fused, leaves, given.trained), expected, eps=2**-7)


def test_channels_last_gives_the_same() -> None:
    given = conv_case()
    leaves = {
        n: None if t is None or t.dim() != 4 else t.to(memory_format=torch.channels_last)
        for n, t in given.tensors.items()
    }
    leaves["bias"] = given.tensors["bias"]
    contract.assert_same(outcome_of(given.fused, leaves, given.trained), outcome(given, given.fused))


@pytest.mark.parametrize(
    "make",
    [partial(conv_case, batch=0), partial(linear_case, (0, 8)), partial(linear_case, (2, 0, 8))],
    ids=["conv2d", "no rows", "no tokens"],
)
def test_an_empty_batch_gives_empty_results(make: Callable[[], Case]) -> None:
    contract.assert_equals_autograd(make())


def test_nan_comes_out() -> None:
    given = conv_case()
    x = given.tensors["x"]
    assert x is not None
    x[1, 2, 3, 3] = math.nan
    ours, theirs = outcome(given, given.fused), outcome(given, given.eager)
    assert torch.equal(ours["y"].isnan(), theirs["y"].isnan()) and ours["y"].isnan().any()
    contract.assert_shows_nan(conv_case(), "weight", (0, 0, 0, 0))
    contract.assert_shows_nan(linear_case(), "weight", (0, 0))


@both
def test_it_works_without_gradients(op: str) -> None:
    contract.assert_right_without_gradients(CASES[op][0]())


@both
def test_it_refuses_what_it_has_no_rules_for(op: str) -> None:
    contract.assert_refuses_what_it_has_no_rules_for(CASES[op][0](), f"frozen_{op}")


@both
def test_it_compiles(op: str) -> None:
    contract.assert_compiles(CASES[op][0]())


def test_what_does_not_fit_is_named() -> None:
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(6, 4, 3, 3)
    trained = weight.clone().requires_grad_()
    with pytest.raises(ValueError, match="frozen_conv2d gives no gradient of weight, which requires one; freeze it"):
        frozen_conv2d(x, trained)
    with pytest.raises(ValueError, match="frozen_linear gives no gradient of bias"):
        frozen_linear(torch.randn(2, 8), torch.randn(6, 8), torch.randn(6, requires_grad=True))
    wanted = r"frozen_conv2d wants x \[N, C, H, W\] and weight \[D, C / 1, KH, KW\], got "
    with pytest.raises(ValueError, match=wanted + r"\(4, 5, 5\) and \(6, 4, 3, 3\)"):
        frozen_conv2d(x[0], weight)
    with pytest.raises(ValueError, match=wanted + r"\(2, 3, 5, 5\) and \(6, 4, 3, 3\)"):
        frozen_conv2d(x[:, :3], weight, skip_product=True)
    with pytest.raises(ValueError, match=r"x is torch\.float64 and the weight torch\.float32; use one dtype"):
        frozen_conv2d(x.double(), weight)


@both
def test_the_output_may_be_changed_in_place(op: str) -> None:
    make, _ = CASES[op]
    contract.assert_can_be_changed_in_place(make())
