"""group_norm_silu on plain torch: exact, as near as eager, keeping its input alone, and what it does with bad input."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fakes import op_contract as contract
from fakes.accuracy import largest_by_sorting
from fakes.op_contract import Case, as_one_picture, kept_numbers, outcome, outcome_of
from lightning_aigc_kernels import group_norm_silu
from lightning_aigc_kernels.group_norm_silu import op, reference
from lightning_aigc_kernels.group_norm_silu.affine import Affine
from lightning_aigc_kernels.group_norm_silu.reference import is_channels_last

GROUPS, EPS = 3, 1e-5
OPS = ["group_norm_silu", "group_norm_silu_backward"]
PARAMETERS = {
    "plain": (),
    "weight": ("weight",),
    "affine": ("weight", "bias"),
    "affine+modulation": ("weight", "bias", "scale", "shift"),
    "affine+scale": ("weight", "bias", "scale"),
    "affine+shift": ("weight", "bias", "shift"),
    "modulation": ("scale", "shift"),
}


def fused(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    silu: bool = True,
    density: float = 1.0,
) -> Tensor:
    return group_norm_silu(
        x, weight, bias, GROUPS, EPS, scale=scale, shift=shift, silu=silu, input_grad_density=density
    )


def eager(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    return reference.group_norm_silu(x, weight, bias, GROUPS, EPS, scale=scale, shift=shift, silu=silu)


def case(
    shape: tuple[int, ...] = (2, 6, 5, 7),
    parameters: str = "affine+modulation",
    trained: tuple[str, ...] | None = None,
    silu: bool = True,
) -> Case:
    """`trained` None is everything."""
    names = PARAMETERS[parameters]
    sizes = {"weight": shape[1:2], "bias": shape[1:2], "scale": shape[:2], "shift": shape[:2]}
    tensors: dict[str, Tensor | None] = {"x": torch.randn(shape, dtype=torch.float64) * 2 + 3}
    tensors |= {name: torch.randn(sizes[name], dtype=torch.float64) for name in names}
    chosen = ("x", *names) if trained is None else trained
    return Case(partial(fused, silu=silu), partial(eager, silu=silu), tensors, chosen)


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "identity"])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_output_and_gradients_equal_autograd(parameters: str, silu: bool) -> None:
    contract.assert_equals_autograd(case(parameters=parameters, silu=silu))
    contract.assert_equals_autograd(case(parameters=parameters, silu=silu, trained=("x",)))


@pytest.mark.parametrize("trained", [("weight",), ("bias",), ("shift",), ("scale", "bias"), ("x", "scale")], ids=str)
def test_any_subset_may_be_trained(trained: tuple[str, ...]) -> None:
    contract.assert_equals_autograd(case(trained=trained))


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "identity"])
@pytest.mark.parametrize("shape", [(4, 6), (2, 6, 5), (2, 3, 3, 2, 2), (3, 9, 1, 1)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...], silu: bool) -> None:
    contract.assert_equals_autograd(case(shape, silu=silu))


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "identity"])
def test_finite_differences_agree(silu: bool) -> None:
    contract.assert_passes_gradcheck(case((2, 6, 2, 3), silu=silu))


@pytest.mark.parametrize("parameters", ["plain", "affine", "affine+modulation"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_it_honours_the_op_contract(parameters: str, layout: torch.memory_format) -> None:
    given = case(parameters=parameters)
    x = given.tensors["x"]
    assert x is not None
    given.tensors["x"] = x.contiguous(memory_format=layout)
    contract.assert_honours_the_op_contract(given, OPS)


def test_it_honours_the_op_contract_for_scattered_input() -> None:
    given = case(parameters="affine")
    x = given.tensors["x"]
    assert x is not None
    given.tensors["x"] = x.transpose(2, 3)
    contract.assert_honours_the_op_contract(given, OPS)


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "identity"])
@pytest.mark.parametrize("parameters", ["plain", "affine", "affine+modulation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_no_worse_than_eager(dtype: torch.dtype, parameters: str, silu: bool) -> None:
    contract.assert_no_worse_than_eager(lambda: case((2, 12, 9, 11), parameters, silu=silu), dtype, RATIO)


RATIO = 1.1  # measured: 1.00 at most, the reference runs eager's own kernels


@pytest.mark.parametrize("parameters", ["affine", "affine+modulation"])
def test_under_autocast_it_is_no_worse_than_eager(parameters: str) -> None:
    contract.assert_no_worse_than_eager(lambda: case((2, 12, 9, 11), parameters), torch.float32, RATIO, torch.bfloat16)


@pytest.mark.parametrize("parameters", ["affine", "affine+modulation"])
def test_it_keeps_its_input_alone(parameters: str) -> None:
    given = case((2, 6, 16, 16), parameters)
    x = given.tensors["x"]
    assert x is not None
    statistics = 2 * 2 * GROUPS
    assert kept_numbers(given, fused, torch.float32) == statistics
    assert kept_numbers(given, eager, torch.float32) >= x.numel() + statistics
    # Autocast makes y a copy in its dtype; what stays beside it is still no tensor of x's size.
    assert kept_numbers(given, fused, torch.float32, torch.bfloat16) == statistics


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (1, 6, 5, 7), (1, 6, 1, 7), (3, 6), (2, 6, 5)], ids=str)
def test_any_strides_give_the_same(shape: tuple[int, ...]) -> None:
    contract.assert_takes_any_strides(case(shape))


def test_it_honours_the_op_contract_for_a_batch_made_of_one_picture() -> None:
    given = case((1, 6, 5, 7), "affine")
    x = given.tensors["x"]
    assert x is not None
    given.tensors["x"] = as_one_picture(x)
    contract.assert_honours_the_op_contract(given, OPS)


def test_an_upstream_gradient_may_be_a_batch_made_of_one_picture() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(1, 6, 5, 7).contiguous(memory_format=layout).requires_grad_()
        dy = torch.randn(1, 6, 5, 7)
        wanted, found = (torch.autograd.grad(group_norm_silu(x, None, None, 3), x, d) for d in (dy, as_one_picture(dy)))
        assert torch.equal(found[0], wanted[0])


def test_what_it_gives_can_be_changed_in_place() -> None:
    contract.assert_can_be_changed_in_place(case())


def test_channels_last_gives_the_same_and_stays() -> None:
    given = case()
    leaves = {name: None if t is None else t.clone() for name, t in given.tensors.items()}
    leaves["x"] = leaves["x"].contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]
    result = outcome_of(fused, leaves, given.trained)
    contract.assert_same(result, outcome(given, fused))
    if (
        given.tensors["weight"].device.type == "cpu"
    ):  # a card has no kernel of channels_last, and makes contiguous results
        assert all(result[name].is_contiguous(memory_format=torch.channels_last) for name in ("y", "x"))


@pytest.mark.parametrize("shape", [(0, 6, 5, 7), (0, 6)], ids=str)
def test_an_empty_batch_gives_empty_results(shape: tuple[int, ...]) -> None:
    result = outcome(case(shape), fused)
    assert result["y"].shape == result["x"].shape == shape and result["scale"].shape == (0, 6)
    assert not result["weight"].any() and not result["bias"].any()


@pytest.mark.parametrize("density", [1.0, 0.3])
def test_nan_comes_out(density: float) -> None:
    given = case()
    sparse = Case(partial(fused, density=density), eager, given.tensors, given.trained)
    contract.assert_shows_nan(sparse, "x", (1, 2, 3, 3))
    contract.assert_shows_nan(sparse, "weight", (4,))
    contract.assert_shows_nan(sparse, "shift", (0, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("density", [0.9, 0.25, 0.01])
def test_below_density_1_each_group_keeps_its_largest_input_gradients(density: float, dtype: torch.dtype) -> None:
    given = case()
    dense, sparse = outcome(given, fused, dtype), outcome(given, partial(fused, density=density), dtype)
    slabs = dense.pop("x").reshape(2 * GROUPS, -1)
    assert torch.equal(sparse.pop("x").reshape(2 * GROUPS, -1), largest_by_sorting(slabs, density))
    assert (largest_by_sorting(slabs, density) != 0).sum(1).min() >= math.ceil(density * slabs.shape[1])
    assert all(torch.equal(sparse[name], dense[name]) for name in dense)


def test_it_works_without_gradients() -> None:
    contract.assert_right_without_gradients(case())


def test_it_refuses_what_it_has_no_rules_for() -> None:
    contract.assert_refuses_what_it_has_no_rules_for(case(), "group_norm_silu")


def test_it_compiles() -> None:
    contract.assert_compiles(case())


def test_what_does_not_fit_is_named() -> None:
    x, weight = torch.randn(2, 8, 3, 3), torch.randn(8)
    with pytest.raises(ValueError, match="num_groups must divide the channels: got 3 groups for 8 channels"):
        group_norm_silu(x, weight, weight, 3)
    with pytest.raises(ValueError, match="got 0 groups for 8 channels"):
        group_norm_silu(x, weight, weight, 0)
    with pytest.raises(ValueError, match=r"bias must be \(8,\) for x \(2, 8, 3, 3\), got \(4,\)"):
        group_norm_silu(x, weight, weight[:4], 2)
    with pytest.raises(ValueError, match=r"scale must be \(2, 8\) for x \(2, 8, 3, 3\), got \(8,\)"):
        group_norm_silu(x, weight, weight, 2, scale=weight)
    with pytest.raises(ValueError, match="needs a weight with a bias, got only a bias"):
        group_norm_silu(x, None, weight, 2)
    with pytest.raises(ValueError, match=r"group_norm_silu wants x \[N, C, ...\], got \(8,\)"):
        group_norm_silu(weight, None, None, 2)
    with pytest.raises(ValueError, match=r"input_grad_density must be in \(0, 1\], got 0; use 1 to keep every entry"):
        group_norm_silu(x, weight, weight, 2, input_grad_density=0)


class StandIn:
    """kernel.py's computation in plain torch: the kernel itself is tested where Triton is."""

    @staticmethod
    def forward(x: Tensor, affine: Affine, groups: int, eps: float, silu: bool) -> tuple[Tensor, Tensor, Tensor]:
        assert x.is_contiguous() or (x.is_cuda and is_channels_last(x))
        dense = x.contiguous()
        y, mean, rstd = torch.ops.aten.native_group_norm(dense, None, None, *x.shape[:2], x[0, 0].numel(), groups, eps)
        slope, offset, _ = StandIn._line(affine)
        y = y * slope + offset
        return torch.empty_like(x).copy_(F.silu(y) if silu else y), mean, rstd

    @staticmethod
    def backward(
        dy: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        affine: Affine,
        groups: int,
        silu: bool,
        need_affine: bool,
        density: float,
    ) -> list[Tensor | None]:
        assert dy.stride() == x.stride() and density == 1
        assert x.is_contiguous() or (x.is_cuda and is_channels_last(x) and not need_affine)

        def over_pixels(statistic_NG: Tensor) -> Tensor:
            return statistic_NG.repeat_interleave(x.shape[1] // groups, dim=1)[..., None, None]

        slope, offset, amplify_NC = StandIn._line(affine)
        xhat = (x - over_pixels(mean)) * over_pixels(rstd)
        dz = torch.ops.aten.silu_backward(dy, xhat * slope + offset) if silu else dy
        means = [over_pixels(t.reshape(x.shape[0], groups, -1).mean(2)) for t in (slope * dz, slope * dz * xhat)]
        dx = torch.empty_like(x).copy_(over_pixels(rstd) * (slope * dz - means[0] - xhat * means[1]))
        if not need_affine:
            return [dx, None, None, None, None]
        dslope_NC, doffset_NC = (dz * xhat).sum((2, 3)), dz.sum((2, 3))
        dscale_NC = dslope_NC * affine.weight + doffset_NC * affine.bias
        modulation = [dscale_NC, doffset_NC] if affine.modulation else [None, None]
        return [dx, (dslope_NC * amplify_NC).sum(0), (doffset_NC * amplify_NC).sum(0), *modulation]

    @staticmethod
    def _line(affine: Affine) -> tuple[Tensor, Tensor, Tensor]:
        scale, shift = affine.modulation or (affine.weight.new_zeros(1, 1),) * 2
        slope, offset = affine.weight * (1 + scale), affine.bias * (1 + scale) + shift
        return slope[..., None, None], offset[..., None, None], 1 + scale


@pytest.mark.parametrize("trained", [None, ("x",)], ids=["all", "frozen"])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_around_a_kernel_the_gradients_of_scale_and_shift_are_right_too(
    parameters: str, trained: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case(parameters=parameters, trained=trained)
    truth = outcome(given, eager)
    monkeypatch.setattr(op, "kernel_for", lambda name, x: StandIn)
    ours = outcome(given, fused, torch.float32)
    contract.assert_same({name: t.double() for name, t in ours.items()}, truth, eps=1e-5)
    # Also what a compiler is told of it: the kernel's results are contiguous, on a card in x's layout where it can.
    given.tensors["x"] = given.tensors["x"].float().contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]
    single = {name: None if t is None else t.float() for name, t in given.tensors.items()}
    contract.assert_honours_the_op_contract(Case(fused, eager, single, given.trained), OPS)
