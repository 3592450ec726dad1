"""modulated_norm on plain torch: exact, no worse than eager, x alone kept, and what is refused."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from fakes import op_contract as contract
from fakes.op_contract import Case, kept_numbers
from lightning_aigc_kernels import modulated_norm
from lightning_aigc_kernels.modulated_norm import NormKind, reference

OPS = ["modulated_norm", "modulated_norm_backward"]
GIVEN = {
    "plain": (),
    "scale": ("scale",),  # Z-Image's last layer
    "shift": ("shift",),
    "scale shift": ("scale", "shift"),  # AdaLayerNormZero
    "weight scale": ("weight", "scale"),  # Z-Image's blocks
    "weight bias": ("weight", "bias"),
    "bias scale": ("bias", "scale"),
    "weight bias shift": ("weight", "bias", "shift"),
    "all": ("scale", "shift", "weight", "bias"),
}
both = pytest.mark.parametrize("norm", ["layer", "rms"])
tensors = pytest.mark.parametrize("given", GIVEN)


def case(
    norm: NormKind = "layer",
    given: str = "all",
    shape: tuple[int, int, int] = (3, 5, 12),
    trained: tuple[str, ...] | None = None,
) -> Case:
    samples, _, channels = shape
    sizes = {"scale": (samples, channels), "shift": (samples, channels), "weight": (channels,), "bias": (channels,)}
    tensors: dict[str, Tensor | None] = {"x": torch.randn(shape, dtype=torch.float64) * 2 + 1}
    tensors |= {name: torch.randn(sizes[name], dtype=torch.float64) for name in GIVEN[given]}
    fused, eager = (functools.partial(f, norm=norm, eps=1e-6) for f in (modulated_norm, reference.modulated_norm))
    return Case(fused, eager, tensors, ("x", *GIVEN[given]) if trained is None else trained)


@both
@tensors
@pytest.mark.parametrize("shape", [(3, 5, 12), (1, 1, 1), (1, 7, 3), (2, 1, 8)], ids=str)
def test_output_and_gradients_equal_autograd(norm: NormKind, given: str, shape: tuple[int, int, int]) -> None:
    contract.assert_equals_autograd(case(norm, given, shape))


@both
@pytest.mark.parametrize(
    "trained", [("x",), ("scale",), ("shift",), ("weight",), ("bias",), ("shift", "bias")], ids=str
)
def test_each_gradient_alone_equals_autograd(norm: NormKind, trained: tuple[str, ...]) -> None:
    contract.assert_equals_autograd(case(norm, trained=trained))


@both
def test_a_row_with_a_token_axis_and_a_row_for_all_samples_are_taken(norm: NormKind) -> None:
    given = case(norm)
    scale, shift = given.tensors["scale"], given.tensors["shift"]
    assert scale is not None and shift is not None
    given.tensors.update(scale=scale[:, None], shift=shift[:1, None])
    contract.assert_equals_autograd(given)


@both
@tensors
def test_finite_differences_agree(norm: NormKind, given: str) -> None:
    contract.assert_passes_gradcheck(case(norm, given))


@both
@pytest.mark.parametrize("given", ["plain", "scale shift", "all"])
def test_it_honours_the_op_contract(norm: NormKind, given: str) -> None:
    contract.assert_honours_the_op_contract(case(norm, given), OPS)


@both
@pytest.mark.parametrize("trained", [("x",), ("shift",), ("scale", "bias")], ids=str)
def test_it_honours_the_op_contract_with_some_gradients(norm: NormKind, trained: tuple[str, ...]) -> None:
    contract.assert_honours_the_op_contract(case(norm, trained=trained), OPS)


def test_it_honours_the_op_contract_for_a_slice_of_the_tokens() -> None:
    given = case("layer")
    x = given.tensors["x"]
    assert x is not None
    given.tensors["x"] = torch.cat([x, x], 1)[:, :5]
    contract.assert_honours_the_op_contract(given, OPS)


RATIO = 1.05


@both
@pytest.mark.parametrize("given", ["plain", "scale shift", "weight scale", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype, norm: NormKind, given: str) -> None:
    contract.assert_no_worse_than_eager(lambda: case(norm, given, (2, 65, 192)), dtype, RATIO)


@both
def test_it_is_no_worse_than_eager_under_autocast(norm: NormKind) -> None:
    contract.assert_no_worse_than_eager(lambda: case(norm, "all", (2, 65, 192)), torch.float32, RATIO, torch.bfloat16)


@both
@pytest.mark.parametrize("trained", [("x",), ("x", "scale", "shift", "weight", "bias")], ids=len)
def test_it_keeps_x_alone(norm: NormKind, trained: tuple[str, ...]) -> None:
    given = case(norm, "all", (2, 16, 64), trained)
    assert kept_numbers(given, given.fused, torch.bfloat16) == 0
    if norm == "rms" or "scale" in trained:
        assert kept_numbers(given, given.eager, torch.bfloat16) >= 2 * 16 * 64


def test_it_keeps_nothing_where_only_the_shift_is_trained() -> None:
    x, shift = torch.randn(2, 3, 8), torch.randn(2, 8, requires_grad=True)
    y = modulated_norm(x, shift=shift)
    assert y.grad_fn is not None
    assert all(saved is None or saved.shape != x.shape for saved in y.grad_fn.saved_tensors)  # type: ignore[attr-defined]


@both
def test_any_strides_give_the_same(norm: NormKind) -> None:
    contract.assert_takes_any_strides(case(norm))


@both
@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6), (2, 5, 0)], ids=str)
def test_an_empty_input_gives_empty_results(norm: NormKind, shape: tuple[int, int, int]) -> None:
    contract.assert_equals_autograd(case(norm, "all", shape))


@both
@pytest.mark.parametrize(("name", "index", "spoiled"), [("x", (1, 2, 3), 12), ("scale", (1, 3), 5), ("bias", (3,), 15)])
def test_nan_comes_out(norm: NormKind, name: str, index: tuple[int, ...], spoiled: int) -> None:
    result = contract.assert_shows_nan(case(norm), name, index)
    assert result["y"].isnan().sum() == spoiled


@both
@pytest.mark.parametrize("samples", [1, 3])
def test_what_it_gives_can_be_changed_in_place(norm: NormKind, samples: int) -> None:
    contract.assert_can_be_changed_in_place(case(norm, shape=(samples, 5, 12)))


@both
def test_it_works_without_gradients(norm: NormKind) -> None:
    contract.assert_right_without_gradients(case(norm))


def test_it_refuses_what_it_has_no_rules_for() -> None:
    contract.assert_refuses_what_it_has_no_rules_for(case(), "modulated_norm")


@both
@pytest.mark.parametrize("trained", [("x",), ("x", "scale", "shift", "weight", "bias")], ids=len)
def test_it_compiles(norm: NormKind, trained: tuple[str, ...]) -> None:
    contract.assert_compiles(case(norm, trained=trained))


def test_each_gradient_has_its_tensors_dtype() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    scale, weight = torch.randn(2, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = modulated_norm(x, scale, weight=weight)
    assert y.dtype == torch.bfloat16
    gradients = torch.autograd.grad(y.float().sum(), [x, scale, weight])
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32, torch.float32]


def test_a_wrong_call_is_named() -> None:
    x, row = torch.randn(2, 5, 6), torch.randn(6)
    with pytest.raises(ValueError, match=r"modulated_norm wants x \[N, T, C\], got \(5, 6\)"):
        modulated_norm(x[0])
    with pytest.raises(ValueError, match="norm must be 'layer' or 'rms', got 'batch'"):
        modulated_norm(x, norm="batch")  # type: ignore[arg-type]
    wanted = r"scale must be \(2, 6\) or \(2, 1, 6\) for x \(2, 5, 6\), got \(2, 5, 6\); a row of each token is not"
    with pytest.raises(ValueError, match=wanted):
        modulated_norm(x, x)
    with pytest.raises(ValueError, match=r"shift must be .*, got \(3, 6\)"):
        modulated_norm(x, shift=torch.randn(3, 6))
    with pytest.raises(ValueError, match=r"weight must be \(6,\) for x \(2, 5, 6\), got \(5,\)"):
        modulated_norm(x, weight=row[:5])
