"""The fused measurement against plain torch, one parameter at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_aigc.callbacks.health.parameter_stats import PendingStats, alike_and_zero, measure, sample_rows


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    named = []
    for i, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.randn(shape).to(dtype))
        parameter.grad = torch.randn(shape).to(dtype)
        named.append((f"p{i}", parameter))
    return named


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_those_of_float64(dtype: torch.dtype) -> None:
    named = parameters((3, 5), (7,), (4, 3, 3, 3), (), dtype=dtype)
    rounding = 1e-5 if dtype != torch.bfloat16 else torch.finfo(dtype).eps  # its norm is a bfloat16
    now = measure(named)
    for i, (_, p) in enumerate(named):
        assert p.grad is not None
        assert now.gradient_norm[i] == pytest.approx(float(p.grad.double().norm()), rel=rounding)
        assert now.weight_norm[i] == pytest.approx(float(p.detach().double().norm()), rel=rounding)


def test_a_float16_gradient_whose_norm_is_beyond_float16_is_finite() -> None:
    [(name, p)] = parameters((64, 64), dtype=torch.float16)
    p.grad = torch.full_like(p, 60000.0)
    assert measure([(name, p)]).gradient_norm[0] == pytest.approx(60000 * 64, rel=1e-4)


def test_a_missing_gradient_leaves_the_others_in_their_places() -> None:
    named = parameters((2, 2), (3, 3), (4, 4))
    named[1][1].grad = None
    now = measure(named)
    assert now.is_missing == (False, True, False)
    assert now.gradient_norm[1] != now.gradient_norm[1]
    assert now.gradient_norm[2] == pytest.approx(float(named[2][1].grad.norm()))  # type: ignore[union-attr]


def test_no_gradient_at_all_and_no_parameter_at_all_are_measured() -> None:
    named = parameters((2, 2))
    named[0][1].grad = None
    assert measure(named).is_missing == (True,)
    assert measure([]).names == ()


def test_a_sparse_gradient_is_measured_by_the_values_that_it_holds() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    assert measure([("table", table.weight)]).gradient_norm[0] == pytest.approx(8**0.5)


def test_a_loss_scale_is_taken_out_on_the_device() -> None:
    named = parameters((8, 8))
    look = PendingStats(named, inverse_scale=torch.tensor(1 / 64))
    norm = look.read(look.numbers.tolist()).gradient_norm[0]
    assert norm == pytest.approx(float(named[0][1].grad.norm()) / 64)  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [3, 31, 256, 257, 100_000])
def test_samples_come_from_the_whole_tensor(count: int) -> None:
    row = sample_rows([torch.arange(count).float()])[0]
    assert row.shape == (256,)
    assert row[0] == 0
    assert row.max() >= 0.7 * (count - 1)
    assert len(row.unique()) == min(count, 256)


def test_samples_of_a_channels_last_tensor_are_views_into_it() -> None:
    tensor = torch.randn(64, 32, 3, 3).to(memory_format=torch.channels_last)
    assert set(sample_rows([tensor])[0].tolist()) <= set(tensor.flatten().tolist())


@pytest.mark.parametrize(
    ("row", "is_alike"),
    [
        (torch.linspace(-1, 1, 256), False),
        (torch.full((256,), 0.3), True),
        (torch.cat([torch.full((231,), 0.3), torch.randn(25)]), True),
        (torch.cat([torch.full((220,), 0.3), 1 + torch.rand(36)]), False),
        (torch.where(torch.arange(256) % 2 == 0, 0.5, -0.5), True),
        (torch.cat([torch.zeros(250), torch.rand(6)]), False),
    ],
)
def test_alike_is_nine_in_ten_of_one_size_and_not_zero(row: Tensor, is_alike: bool) -> None:
    alike, zeros = alike_and_zero(row[None], 0.9)
    assert bool(alike[0]) == is_alike
    assert float(zeros[0]) == pytest.approx(float((row == 0).float().mean()))
