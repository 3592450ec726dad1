"""GroupNorm + SiLU in Triton against float64 autograd: forward, every gradient, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.accuracy import assert_as_exact_as_eager, group_norm_silu_and_gradients
from lightning_aigc_kernels.group_norm_silu import kernel

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Shape and groups: nothing divides a tile; one channel a group; many channels of few pixels; a single pixel; no space.
SHAPES = [((2, 6, 5, 7), 3), ((1, 5, 13, 11), 5), ((3, 40, 3, 3), 2), ((2, 24, 1, 1), 3), ((5, 12), 4)]
RATIO = 3.0  # the worst seen in the interpreter is 1.8, a float32 sum in another order
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's word for sigmoid(-100)


def assert_all_exact(ours: tuple[Tensor | None, ...], *arguments: Any) -> None:
    """y, dx and the affine gradients against float64; the measure is float32 eager, rounded to the kernel's dtype."""
    truth = group_norm_silu_and_gradients(torch.float64, EPS, *arguments)
    eager = group_norm_silu_and_gradients(torch.float32, EPS, *arguments)
    for got, theirs, exact in zip(ours, eager, truth, strict=True):
        assert got is not None
        assert_as_exact_as_eager(got, theirs.to(got.dtype), exact, RATIO)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight_NC, bias_NC, dy; x is off centre, where E[x^2] - E[x]^2 would lose digits."""
    x = (torch.randn(shape) * 2 + 30).to(dtype)
    weight, bias, dy = torch.randn(shape[:2]), torch.randn(shape[:2]), torch.randn(shape).to(dtype)
    return x.to(device), weight.to(device), bias.to(device), dy.to(device)


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "identity"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_output_and_every_gradient_match_float64(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, silu: bool, device: torch.device
) -> None:
    x, weight, bias, dy = inputs(shape, dtype, device)
    y, mean, rstd = kernel.forward(x, weight, bias, groups, EPS, silu)
    dx, weight_grad, bias_grad = kernel.backward(dy, x, mean, rstd, weight, bias, groups, silu, True, 1.0)
    assert_all_exact((y, dx, weight_grad, bias_grad), x, weight, bias, dy, groups, silu)
    assert mean.dtype == rstd.dtype == torch.float32


@pytest.mark.parametrize("affine", [torch.float16, torch.bfloat16], ids=str)
def test_a_half_precision_affine_is_read_as_it_is(affine: torch.dtype, device: torch.device) -> None:
    x, weight, bias, dy = inputs((2, 6, 5, 7), torch.bfloat16, device)
    weight, bias = weight.to(affine), bias.to(affine)
    y, mean, rstd = kernel.forward(x, weight, bias, 3, EPS, True)
    dx, weight_grad, bias_grad = kernel.backward(dy, x, mean, rstd, weight, bias, 3, True, True, 1.0)
    assert_all_exact((y, dx, weight_grad, bias_grad), x, weight, bias, dy, 3, True)


@pytest.mark.parametrize("table", ["cuda", "npu"])
def test_the_tiles_of_real_chips_give_the_same(
    table: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, dy = inputs((2, 20, 23, 29), torch.float16, device)
    for configs in (kernel.FORWARD, kernel.BACKWARD):
        monkeypatch.setitem(configs, device.type, configs[table])
    y, mean, rstd = kernel.forward(x, weight, bias, 2, EPS, True)
    dx, weight_grad, bias_grad = kernel.backward(dy, x, mean, rstd, weight, bias, 2, True, True, 1.0)
    assert_all_exact((y, dx, weight_grad, bias_grad), x, weight, bias, dy, 2, True)


def test_samples_may_share_one_affine_row(device: torch.device) -> None:
    x, weight, bias, dy = inputs((3, 8, 5, 5), torch.float32, device)
    shared = [t[0].expand(3, 8) for t in (weight, bias)]
    copied = [t.contiguous() for t in shared]
    assert shared[0].stride() == (0, 1)
    results = []
    for pair in (shared, copied):
        y, mean, rstd = kernel.forward(x, *pair, 4, EPS, True)
        results.append((y, *kernel.backward(dy, x, mean, rstd, *pair, 4, True, True, 1.0)))
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None and theirs is not None
        assert torch.equal(ours, theirs)


def test_a_frozen_affine_costs_no_gradient_and_changes_no_dx(device: torch.device) -> None:
    x, weight, bias, dy = inputs((2, 6, 5, 7), torch.float16, device)
    _, mean, rstd = kernel.forward(x, weight, bias, 3, EPS, True)
    trainable = kernel.backward(dy, x, mean, rstd, weight, bias, 3, True, True, 1.0)
    frozen = kernel.backward(dy, x, mean, rstd, weight, bias, 3, True, False, 1.0)
    assert frozen[1] is None and frozen[2] is None
    assert torch.equal(frozen[0], trainable[0])


@pytest.mark.parametrize("density", [0.8, 0.25, 1e-9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_below_density_1_each_slab_keeps_its_largest_gradients(
    dtype: torch.dtype, density: float, device: torch.device
) -> None:
    x, weight, bias, dy = inputs((2, 6, 13, 7), dtype, device)
    _, mean, rstd = kernel.forward(x, weight, bias, 3, EPS, True)
    dense, *dense_sums = kernel.backward(dy, x, mean, rstd, weight, bias, 3, True, True, 1.0)
    sparse, *sparse_sums = kernel.backward(dy, x, mean, rstd, weight, bias, 3, True, True, density)
    slabs = dense.reshape(6, -1)
    keep = math.ceil(density * slabs.shape[1])
    smallest_kept = slabs.abs().topk(keep, dim=1).values[:, -1:]
    assert torch.equal(sparse.reshape(6, -1), torch.where(slabs.abs() >= smallest_kept, slabs, 0))
    assert all(torch.equal(a, b) for a, b in zip(dense_sums, sparse_sums, strict=True))


@pytest.mark.parametrize("density", [1.0, 0.5])
def test_a_nan_stays_in_its_slab_and_is_seen(density: float, device: torch.device) -> None:
    x, weight, bias, dy = inputs((2, 6, 5, 7), torch.float32, device)
    x[1, 2, 3, 3] = math.nan  # sample 1, group 1 of 3
    y, mean, rstd = kernel.forward(x, weight, bias, 3, EPS, True)
    dx, *_ = kernel.backward(dy, x, mean, rstd, weight, bias, 3, True, True, density)
    expected = torch.zeros(2, 3, 70, dtype=torch.bool, device=device)
    expected[1, 1] = True
    for tensor in (y, dx):
        assert torch.equal(tensor.isnan().reshape(2, 3, 70), expected)


def test_a_nan_in_the_incoming_gradient_comes_out(device: torch.device) -> None:
    x, weight, bias, dy = inputs((1, 4, 5, 5), torch.float16, device)
    dy[0, 3, 4, 4] = math.nan
    _, mean, rstd = kernel.forward(x, weight, bias, 2, EPS, True)
    dx, weight_grad, bias_grad = kernel.backward(dy, x, mean, rstd, weight, bias, 2, True, True, 0.1)
    assert weight_grad is not None and bias_grad is not None
    assert dx[0, 2:].isnan().all() and not dx[0, :2].isnan().any()
    assert weight_grad.isnan().tolist() == bias_grad.isnan().tolist() == [[False, False, False, True]]


def test_a_constant_slab_gives_the_bias_and_no_infinity(device: torch.device) -> None:
    x, weight, bias, dy = inputs((1, 4, 3, 3), torch.float32, device)
    y, mean, rstd = kernel.forward(torch.full_like(x, 7.0), weight, bias, 2, EPS, False)
    torch.testing.assert_close(y, bias[..., None, None].expand_as(y))
    dx, *_ = kernel.backward(dy, torch.full_like(x, 7.0), mean, rstd, weight, bias, 2, False, True, 1.0)
    assert dx.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 6, 5, 7), (2, 6, 0, 7)], ids=str)
def test_an_empty_batch_gives_empty_results(shape: tuple[int, ...], device: torch.device) -> None:
    x, affine = torch.ones(shape, device=device), torch.ones(shape[:2], device=device)
    y, mean, rstd = kernel.forward(x, affine, affine, 3, EPS, True)
    dx, weight_grad, bias_grad = kernel.backward(x, x, mean, rstd, affine, affine, 3, True, True, 0.5)
    assert y.shape == dx.shape == shape and mean.shape == rstd.shape == (shape[0], 3)
    assert weight_grad is not None and bias_grad is not None
    assert weight_grad.shape == bias_grad.shape == shape[:2]
    assert not weight_grad.any() and not bias_grad.any()


def test_what_cannot_be_served_is_refused_with_the_reason(device: torch.device) -> None:
    x, weight, bias, dy = inputs((2, 6, 4, 4), torch.float32, device)
    with pytest.raises(ValueError, match="6 channels do not divide into 4 groups; use a divisor of 6"):
        kernel.forward(x, weight, bias, 4, EPS, True)
    with pytest.raises(ValueError, match="x must be contiguous"):
        kernel.forward(x.transpose(2, 3), weight, bias, 3, EPS, True)
    with pytest.raises(ValueError, match=r"weight must be float32, .* of shape \(2, 6\), got torch.float64"):
        kernel.forward(x, weight.double(), bias, 3, EPS, True)
    _, mean, rstd = kernel.forward(x, weight, bias, 3, EPS, True)
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 0; use 1 to keep every gradient"):
        kernel.backward(dy, x, mean, rstd, weight, bias, 3, True, True, 0)
    with pytest.raises(ValueError, match="dy must be contiguous"):
        kernel.backward(dy.transpose(2, 3), x, mean, rstd, weight, bias, 3, True, True, 1.0)
