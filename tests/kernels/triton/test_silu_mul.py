"""SwiGLU of two tensors in Triton against float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fakes.accuracy import assert_as_exact_as_eager, silu_mul_and_gradients
from lightning_aigc_kernels.silu_mul import kernel

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RATIO = 3.0  # the worst seen in the interpreter is below 2, as geglu's
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's word for sigmoid(-100)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Gate, up and the product's gradient."""
    return [(torch.randn(shape) * 3).to(dtype).to(device) for _ in range(3)]


def outcome(gate: Tensor, up: Tensor, dproduct: Tensor) -> tuple[Tensor, ...]:
    dgate, dup = kernel.backward(dproduct, gate, up, True, True)
    assert dgate is not None and dup is not None
    return kernel.forward(gate, up), dgate, dup


def assert_exact(ours: tuple[Tensor, ...], gate: Tensor, up: Tensor, dproduct: Tensor) -> None:
    truth, eager = (silu_mul_and_gradients(dtype, gate, up, dproduct) for dtype in (torch.float64, torch.float32))
    for tensor, theirs, exact in zip(ours, eager, truth, strict=True):
        assert_as_exact_as_eager(tensor, theirs.to(gate.dtype), exact, RATIO)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 131), (2, 33, 5), (3, 1), (64,), (2, 3, 4, 9)], ids=str)
def test_product_and_gradients_match_float64(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    given = inputs(shape, dtype, device)
    assert_exact(outcome(*given), *given)


@pytest.mark.parametrize("table", ["cuda", "npu"])
def test_the_tiles_of_real_chips_give_the_same(
    table: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs((50, 1500), torch.float16, device)
    for configs in (kernel.FORWARD, kernel.BACKWARD):
        monkeypatch.setitem(configs, device.type, configs[table])
    assert_exact(outcome(*given), *given)


def test_views_of_wider_tensors_are_read_where_they_lie(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs((2, 7, 33), torch.float32, device)
    expected = outcome(*given)

    def halves(gate: Tensor, up: Tensor, dproduct: Tensor) -> list[Tensor]:
        before = torch.full((2, 7, 5), math.nan, device=device)
        return [*torch.cat([before, gate, up], -1)[..., 5:].chunk(2, dim=-1), dproduct]

    def tokens(*tensors: Tensor) -> list[Tensor]:
        return [torch.cat([tensor, torch.full_like(tensor, math.nan)], 1)[:, :7] for tensor in tensors]

    views = [halves(*given), tokens(*given), [*tokens(*given[:2]), given[2]]]
    monkeypatch.setattr(Tensor, "contiguous", lambda tensor: pytest.fail("a copy"))
    for laid in views:
        assert all(torch.equal(ours, same) for ours, same in zip(outcome(*laid), expected, strict=True))


def test_strided_rows_give_the_same(device: torch.device) -> None:
    given = inputs((2, 7, 33), torch.float32, device)
    scattered = [tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0) for tensor in given]
    assert all(torch.equal(ours, same) for ours, same in zip(outcome(*scattered), outcome(*given), strict=True))


def test_only_needed_gradients_are_given(device: torch.device) -> None:
    gate, up, dproduct = inputs((7, 33), torch.float32, device)
    _, dgate, dup = outcome(gate, up, dproduct)
    ours, nothing = kernel.backward(dproduct, gate, up, True, False)
    assert nothing is None and ours is not None and torch.equal(ours, dgate)
    nothing, ours = kernel.backward(dproduct, gate, None, False, True)
    assert nothing is None and ours is not None and torch.equal(ours, dup)


def test_a_nan_stays_in_its_place_and_is_seen(device: torch.device) -> None:
    gate, up, dproduct = inputs((3, 33), torch.float32, device)
    gate[1, 4] = math.nan
    for tensor in outcome(gate, up, dproduct):
        assert tensor.isnan().nonzero().tolist() == [[1, 4]]


def test_far_gates_neither_overflow_nor_vanish_into_nan(device: torch.device) -> None:
    gate, up = torch.tensor([[-200.0, 200.0]], device=device), torch.tensor([[2.0, 2.0]], device=device)
    product, dgate, dup = outcome(gate, up, torch.ones_like(gate))
    assert (product.tolist(), dgate.tolist(), dup.tolist()) == ([[0.0, 400.0]], [[0.0, 2.0]], [[0.0, 200.0]])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_empty_inputs_give_empty_results(shape: tuple[int, int], device: torch.device) -> None:
    for tensor in outcome(*inputs(shape, torch.float32, device)):
        assert tensor.shape == shape
