"""GroupNorm + SiLU in Triton against float64 autograd: forward, every gradient, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.accuracy import assert_as_exact_as_eager, group_norm_silu_and_gradients
from lightning_aigc_kernels.group_norm_silu import kernel, split
from lightning_aigc_kernels.group_norm_silu.affine import affine_of
from lightning_aigc_kernels.launch import LaunchConfig

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Shape and groups: nothing divides a tile; one channel a group; many channels of few pixels; a single pixel; no space.
SHAPES = [((2, 6, 5, 7), 3), ((1, 5, 13, 11), 5), ((3, 40, 3, 3), 2), ((2, 24, 1, 1), 3), ((5, 12), 4)]
# The worst seen in the interpreter is 3.1, of a modulated bias: float32 sums over pixels and samples in another order.
RATIO = 4.0
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's word for sigmoid(-100)


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    modulation: tuple[Tensor, ...],
    dy: Tensor,
    groups: int,
    silu: bool = True,
    need_affine: bool = True,
    density: float = 1.0,
) -> tuple[Tensor | None, ...]:
    """y and the five gradients."""
    affine = affine_of(x, weight, bias, *(modulation or (None, None)))
    y, mean, rstd = kernel.forward(x, affine, groups, EPS, silu)
    assert mean.dtype == rstd.dtype == torch.float32
    return y, *kernel.backward(dy, x, mean, rstd, affine, groups, silu, need_affine, density)


def assert_all_exact(
    x: Tensor, weight: Tensor, bias: Tensor, modulation: tuple[Tensor, ...], dy: Tensor, groups: int, silu: bool = True
) -> None:
    """y and all gradients against float64; the measure is float32 eager, rounded to the kernel's dtype."""
    given = (x, weight, bias, modulation, dy, groups, silu)
    truth = group_norm_silu_and_gradients(torch.float64, EPS, *given)
    eager = group_norm_silu_and_gradients(torch.float32, EPS, *given)
    ours = [tensor for tensor in run(*given) if tensor is not None]
    for got, theirs, exact, of in zip(ours, eager, truth, (x, x, weight, bias, *modulation), strict=True):
        assert got.dtype == of.dtype
        assert_as_exact_as_eager(got, theirs.to(got.dtype), exact, RATIO)


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, modulated: bool = False
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...], Tensor]:
    """x, weight, bias, scale and shift if asked for, dy; x is off centre, where E[x^2] - E[x]^2 would lose digits."""
    x = (torch.randn(shape) * 2 + 30).to(dtype)
    weight, bias, dy = torch.randn(shape[1]), torch.randn(shape[1]), torch.randn(shape).to(dtype)
    # As blocks make them: two halves of one projection, so that a sample's row is not next to the one before.
    modulation = torch.randn(shape[0], 2 * shape[1]).to(device, dtype).chunk(2, dim=1) if modulated else ()
    return x.to(device), weight.to(device), bias.to(device), modulation, dy.to(device)


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "identity"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_output_and_every_gradient_match_float64(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, silu: bool, modulated: bool, device: torch.device
) -> None:
    assert_all_exact(*inputs(shape, dtype, device, modulated), groups, silu)


@pytest.mark.parametrize("affine", [torch.float16, torch.bfloat16], ids=str)
def test_a_half_precision_affine_is_read_and_answered_as_it_is(affine: torch.dtype, device: torch.device) -> None:
    x, weight, bias, modulation, dy = inputs((2, 6, 5, 7), torch.bfloat16, device, modulated=True)
    assert_all_exact(x, weight.to(affine), bias.to(affine), modulation, dy, 3)


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("table", ["cuda", "npu"])
def test_the_tiles_of_real_chips_give_the_same(
    table: str, modulated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for configs in (kernel.FORWARD, kernel.BACKWARD, kernel.BACKWARD_SPARSE, kernel.SUMS):
        monkeypatch.setitem(configs, device.type, configs[table])
    assert_all_exact(*inputs((2, 20, 23, 29), torch.float16, device, modulated), 2)


def assert_split_is_exact(given: tuple[Any, ...], statistics: tuple[Tensor, ...]) -> None:
    """y, both statistics and dx of `split`'s kernels against float64, in x's layout; no other gradient."""
    x, weight, bias, modulation, dy, groups, silu = given
    affine = affine_of(x, weight, bias, *(modulation or (None, None)))
    y, mean, rstd = kernel.forward(x, affine, groups, EPS, silu)
    torch.testing.assert_close((mean, rstd), statistics, rtol=1e-5, atol=1e-6)
    dx, *nothing = kernel.backward(dy, x, mean, rstd, affine, groups, silu, False, 1.0)
    assert nothing == [None] * 4
    assert y.stride() == dx.stride() == x.stride()
    truth = group_norm_silu_and_gradients(torch.float64, EPS, *given)
    eager = group_norm_silu_and_gradients(torch.float32, EPS, *given)
    for got, theirs, exact in zip((y, dx), eager[:2], truth[:2], strict=True):
        assert_as_exact_as_eager(got, theirs.to(got.dtype), exact, RATIO)


@pytest.mark.parametrize(("silu", "modulated"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("programs", [3, 24])
@pytest.mark.parametrize(("shape", "groups"), [((1, 6, 19, 17), 3), ((2, 40, 3, 3), 2), ((3, 2, 130, 8), 1)], ids=str)
def test_programs_that_share_a_slab_give_what_one_gives(
    shape: tuple[int, ...],
    groups: int,
    programs: int,
    dtype: torch.dtype,
    silu: bool,
    modulated: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """y, both statistics and dx against float64; the last splits of a slab have fewer tiles, or none."""
    x, weight, bias, modulation, dy = inputs(shape, dtype, device, modulated)
    affine = affine_of(x, weight, bias, *(modulation or (None, None)))
    statistics = kernel.forward(x, affine, groups, EPS, silu)[1:]
    monkeypatch.setattr(split, "wanted_programs", lambda *_: programs)
    channels, pixels = shape[1] // groups, math.prod(shape[2:])
    small = {device.type: LaunchConfig(64, 65_535)}
    monkeypatch.setattr(split, "FORWARD", small), monkeypatch.setattr(split, "BACKWARD", small)
    for is_backward in (False, True):
        cut = split.shared(x, groups, channels, pixels, is_backward=is_backward)
        assert (cut is not None) == (programs > shape[0] * groups)
    assert_split_is_exact((x, weight, bias, modulation, dy, groups, silu), statistics)


@pytest.mark.parametrize(("silu", "modulated"), [(True, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("programs", [0, 24])
@pytest.mark.parametrize(("shape", "groups"), [((1, 30, 19, 17), 3), ((2, 40, 3, 3), 2), ((3, 2, 130, 8), 1)], ids=str)
def test_channels_last_is_read_and_written_as_it_is(
    shape: tuple[int, ...],
    groups: int,
    programs: int,
    dtype: torch.dtype,
    silu: bool,
    modulated: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """y, both statistics and dx against float64, with one program for a slab and with several."""
    x, weight, bias, modulation, dy = inputs(shape, dtype, device, modulated)
    x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    affine = affine_of(x, weight, bias, *(modulation or (None, None)))
    statistics = kernel.forward(x.contiguous(), affine, groups, EPS, silu)[1:]
    monkeypatch.setattr(split, "wanted_programs", lambda *_: programs)
    small = {device.type: LaunchConfig(64, 65_535)}
    monkeypatch.setattr(split, "FORWARD", small), monkeypatch.setattr(split, "BACKWARD", small)
    assert_split_is_exact((x, weight, bias, modulation, dy, groups, silu), statistics)


def test_a_gradient_in_another_layout_is_refused(device: torch.device) -> None:
    x, weight, bias, _, dy = inputs((2, 6, 5, 7), torch.float32, device)
    affine = affine_of(x, weight, bias, None, None)
    last = x.contiguous(memory_format=torch.channels_last)
    _, mean, rstd = kernel.forward(last, affine, 3, EPS, True)
    with pytest.raises(ValueError, match="in x's layout"):
        kernel.backward(dy, last, mean, rstd, affine, 3, True, False, 1.0)
    with pytest.raises(ValueError, match="x must be contiguous for gradients of affine tensors"):
        kernel.backward(last, last, mean, rstd, affine, 3, True, True, 1.0)


@pytest.mark.parametrize("missing", ["scale", "shift"])
def test_a_scale_or_a_shift_may_come_alone(missing: str, device: torch.device) -> None:
    x, weight, bias, (scale, shift), dy = inputs((2, 6, 5, 7), torch.float32, device, modulated=True)
    alone = (None, shift) if missing == "scale" else (scale, None)
    zeros = torch.zeros_like(scale)
    filled = (zeros, shift) if missing == "scale" else (scale, zeros)
    for ours, theirs in zip(run(x, weight, bias, alone, dy, 3), run(x, weight, bias, filled, dy, 3), strict=True):
        assert ours is not None and theirs is not None
        assert torch.equal(ours, theirs)


def test_without_weight_and_bias_they_are_ones_and_zeros(device: torch.device) -> None:
    x, weight, bias, _, dy = inputs((2, 6, 5, 7), torch.float32, device)
    absent = affine_of(x, None, None, None, None)
    given = affine_of(x, torch.ones_like(weight), torch.zeros_like(bias), None, None)
    y, mean, rstd = kernel.forward(x, absent, 3, EPS, True)
    assert torch.equal(y, kernel.forward(x, given, 3, EPS, True)[0])
    grads = [kernel.backward(dy, x, mean, rstd, affine, 3, True, False, 1.0)[0] for affine in (absent, given)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
def test_frozen_parameters_cost_no_gradient_and_change_no_dx(modulated: bool, device: torch.device) -> None:
    given = inputs((2, 6, 5, 7), torch.float16, device, modulated)
    _, trainable, *_ = run(*given, 3)
    _, frozen, *others = run(*given, 3, need_affine=False)
    assert others == [None] * 4
    assert trainable is not None and frozen is not None and torch.equal(frozen, trainable)


@pytest.mark.parametrize("density", [0.8, 0.25, 1e-9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_below_density_1_each_slab_keeps_its_largest_gradients(
    dtype: torch.dtype, density: float, device: torch.device
) -> None:
    given = inputs((2, 6, 13, 7), dtype, device, modulated=True)
    _, dense, *dense_sums = run(*given, 3)
    _, sparse, *sparse_sums = run(*given, 3, density=density)
    assert dense is not None and sparse is not None
    slabs = dense.reshape(6, -1)
    keep = math.ceil(density * slabs.shape[1])
    smallest_kept = slabs.abs().topk(keep, dim=1).values[:, -1:]
    assert torch.equal(sparse.reshape(6, -1), torch.where(slabs.abs() >= smallest_kept, slabs, 0))
    for a, b in zip(dense_sums, sparse_sums, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("density", [1.0, 0.5])
def test_a_nan_stays_in_its_slab_and_is_seen(density: float, device: torch.device) -> None:
    x, *others = inputs((2, 6, 5, 7), torch.float32, device)
    x[1, 2, 3, 3] = math.nan  # sample 1, group 1 of 3
    y, dx, *_ = run(x, *others, 3, density=density)
    expected = torch.zeros(2, 3, 70, dtype=torch.bool, device=device)
    expected[1, 1] = True
    for tensor in (y, dx):
        assert tensor is not None and torch.equal(tensor.isnan().reshape(2, 3, 70), expected)


def test_a_nan_in_the_incoming_gradient_comes_out(device: torch.device) -> None:
    *others, dy = inputs((1, 4, 5, 5), torch.float16, device)
    dy[0, 3, 4, 4] = math.nan
    _, dx, weight_grad, bias_grad, *_ = run(*others, dy, 2, density=0.1)
    assert dx is not None and weight_grad is not None and bias_grad is not None
    assert dx[0, 2:].isnan().all() and not dx[0, :2].isnan().any()
    assert weight_grad.isnan().tolist() == bias_grad.isnan().tolist() == [False, False, False, True]


def test_a_constant_slab_gives_the_bias_and_no_infinity(device: torch.device) -> None:
    x, weight, bias, _, dy = inputs((1, 4, 3, 3), torch.float32, device)
    y, dx, *_ = run(torch.full_like(x, 7.0), weight, bias, (), dy, 2, silu=False)
    assert y is not None and dx is not None and dx.isfinite().all()
    torch.testing.assert_close(y, bias[:, None, None].expand_as(y))


@pytest.mark.parametrize("shape", [(0, 6, 5, 7), (2, 6, 0, 7)], ids=str)
def test_an_empty_batch_gives_empty_results(shape: tuple[int, ...], device: torch.device) -> None:
    x, weight, modulation = (torch.ones(s, device=device) for s in (shape, shape[1:2], shape[:2]))
    y, dx, *grads = run(x, weight, weight, (modulation, modulation), x, 3, density=0.5)
    assert y is not None and dx is not None and y.shape == dx.shape == shape
    for grad, of in zip(grads, (weight, weight, modulation, modulation), strict=True):
        assert grad is not None and grad.shape == of.shape and not grad.any()


def test_what_cannot_be_served_is_refused_with_the_reason(device: torch.device) -> None:
    x, weight, bias, _, dy = inputs((2, 6, 4, 4), torch.float32, device)
    affine = affine_of(x, weight, bias, None, None)
    with pytest.raises(ValueError, match="6 channels do not divide into 4 groups; use a divisor of 6"):
        kernel.forward(x, affine, 4, EPS, True)
    with pytest.raises(ValueError, match="x must be contiguous"):
        kernel.forward(x.transpose(2, 3), affine, 3, EPS, True)
    with pytest.raises(ValueError, match=r"weight must be float32, .* of shape \(6,\), got torch.float64"):
        affine_of(x, weight.double(), bias, None, None)
    with pytest.raises(ValueError, match=r"scale must be float32, .* of shape \(2, 6\), got .* of shape \(6,\)"):
        affine_of(x, weight, bias, bias, None)
    _, mean, rstd = kernel.forward(x, affine, 3, EPS, True)
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 0; use 1 to keep every gradient"):
        kernel.backward(dy, x, mean, rstd, affine, 3, True, True, 0)
    with pytest.raises(ValueError, match=r"dy must be \(2, 6, 4, 4\) in x's layout"):
        kernel.backward(dy.transpose(2, 3), x, mean, rstd, affine, 3, True, True, 1.0)
