"""GEGLU and SwiGLU in Triton against float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fakes.accuracy import assert_as_exact_as_eager, geglu_and_gradient
from lightning_aigc_kernels.geglu import kernel

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RATIO = 3.0  # the worst seen in the interpreter is 1.8, a float32 sum in another order
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's word for sigmoid(-100)


def inputs(rows: int, features: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    projected = (torch.randn(rows, 2 * features) * 3).to(dtype)
    return projected.to(device), torch.randn(rows, features).to(dtype).to(device)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "features"), [(7, 131), (33, 5), (3, 1), (1, 64)])
def test_product_and_gradient_match_float64(
    rows: int, features: int, dtype: torch.dtype, activation: kernel.Activation, device: torch.device
) -> None:
    projected, dproduct = inputs(rows, features, dtype, device)
    product = kernel.forward(projected, activation)
    dprojected, again = kernel.backward(dproduct, projected, activation, True)
    truth = geglu_and_gradient(torch.float64, projected, dproduct, activation)
    eager = geglu_and_gradient(torch.float32, projected, dproduct, activation)
    for ours, theirs, exact in zip((product, dprojected), eager, truth, strict=True):
        assert_as_exact_as_eager(ours, theirs.to(dtype), exact, RATIO)
    assert again is not None
    assert torch.equal(again, product)


@pytest.mark.parametrize("table", ["cuda", "npu"])
def test_the_tiles_of_real_chips_give_the_same(
    table: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    projected, dproduct = inputs(50, 1500, torch.float16, device)
    for configs in (kernel.FORWARD, kernel.BACKWARD):
        monkeypatch.setitem(configs, device.type, configs[table])
    truth = geglu_and_gradient(torch.float64, projected, dproduct, "gelu")
    eager = geglu_and_gradient(torch.float32, projected, dproduct, "gelu")
    ours = kernel.forward(projected, "gelu"), kernel.backward(dproduct, projected, "gelu", False)[0]
    for got, theirs, exact in zip(ours, eager, truth, strict=True):
        assert_as_exact_as_eager(got, theirs.half(), exact, RATIO)


def test_the_product_is_left_out_when_nobody_needs_it(device: torch.device) -> None:
    projected, dproduct = inputs(7, 33, torch.float32, device)
    dprojected, product = kernel.backward(dproduct, projected, "gelu", False)
    assert product is None
    assert torch.equal(dprojected, kernel.backward(dproduct, projected, "gelu", True)[0])


def test_a_nan_stays_in_its_place_and_is_seen(device: torch.device) -> None:
    projected, dproduct = inputs(3, 33, torch.float32, device)
    projected[1, 33 + 4] = math.nan  # the gate of feature 4
    product = kernel.forward(projected, "gelu")
    dprojected, _ = kernel.backward(dproduct, projected, "gelu", False)
    assert product.isnan().nonzero().tolist() == [[1, 4]]
    assert dprojected.isnan().nonzero().tolist() == [[1, 4], [1, 37]]


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_far_gates_neither_overflow_nor_vanish_into_nan(activation: kernel.Activation, device: torch.device) -> None:
    projected = torch.tensor([[2.0, 2.0, -200.0, 200.0]], device=device)
    assert kernel.forward(projected, activation).tolist() == [[0.0, 400.0]]
    dprojected, _ = kernel.backward(torch.ones(1, 2, device=device), projected, activation, False)
    assert dprojected.tolist() == [[0.0, 200.0, 0.0, 2.0]]


def test_zero_rows_give_empty_results(device: torch.device) -> None:
    projected = torch.ones(0, 10, device=device)
    dprojected, product = kernel.backward(torch.ones(0, 5, device=device), projected, "silu", True)
    assert product is not None
    assert kernel.forward(projected, "silu").shape == product.shape == (0, 5) and dprojected.shape == (0, 10)


def test_what_cannot_be_served_is_refused_with_the_reason(device: torch.device) -> None:
    projected, dproduct = inputs(4, 4, torch.float32, device)
    with pytest.raises(ValueError, match=r"projected must be contiguous \[R, 2 D\], got \(4, 7\)"):
        kernel.forward(projected[:, :7].contiguous(), "gelu")
    with pytest.raises(ValueError, match="activation must be 'gelu' or 'silu', got 'relu'"):
        kernel.forward(projected, "relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dproduct must be contiguous \(4, 4\)"):
        kernel.backward(dproduct.T, projected, "gelu", False)
