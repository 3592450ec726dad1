"""RMSNorm and rotation of queries and keys in Triton against float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fakes.accuracy import assert_as_exact_as_eager, qk_norm_rope_and_gradients
from lightning_aigc_kernels.launch import LaunchConfig
from lightning_aigc_kernels.qk_norm_rope import kernel
from lightning_aigc_kernels.qk_norm_rope.norm_rope import NormRope

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RATIO = 4.0  # of the largest error; the worst of four seeds in the interpreter is 2.4, a float32 sum in another order
SHAPES = [(2, 5, 3, 8), (1, 7, 1, 10), (3, 2, 9, 2), (2, 3, 5, 70)]
KINDS: dict[str, dict[str, bool]] = {
    "norm and rotation": {},
    "norm alone": {"rotate": False},
    "norm without weight": {"weighted": False, "rotate": False},
    "rotation alone": {"weighted": False, "norm": False},
    "rotation a sample": {"per_sample": True},
    "nothing": {"weighted": False, "norm": False, "rotate": False},
}
Given = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""x, weight, angles and dy."""


def inputs(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Given:
    samples, tokens, _, features = shape
    options = KINDS[kind]
    weight, angles = None, None
    if options.get("weighted", True):
        weight = torch.randn(features).to(dtype).to(device)
    if options.get("rotate", True):
        lead = (samples, tokens) if options.get("per_sample") else (tokens,)
        angles = (torch.randn(*lead, features // 2) * 3).to(device)
    return (torch.randn(shape) * 2).to(dtype).to(device), weight, angles, torch.randn(shape).to(dtype).to(device)


def how_of(kind: str, weight: Tensor | None, angles: Tensor | None) -> NormRope:
    cos, sin = (None, None) if angles is None else (angles.cos(), angles.sin())
    return NormRope(weight, cos, sin, EPS, KINDS[kind].get("norm", True))


def outcome(kind: str, x: Tensor, weight: Tensor | None, angles: Tensor | None, dy: Tensor) -> list[Tensor]:
    """y, dx and, with a weight, its gradient in x's dtype."""
    how = how_of(kind, weight, angles)
    y = kernel.forward(x, how, torch.empty(x.shape, dtype=x.dtype, device=x.device))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    made, dweight = kernel.backward(dy, x, how, dx, weight is not None)
    assert made is dx and (dweight is None) == (weight is None)
    return [y, dx, *([] if dweight is None else [dweight.to(x.dtype)])]


def assert_exact(kind: str, x: Tensor, weight: Tensor | None, angles: Tensor | None, dy: Tensor) -> None:
    ours = outcome(kind, x, weight, angles, dy)
    norm = KINDS[kind].get("norm", True)
    truth = qk_norm_rope_and_gradients(torch.float64, x, weight, angles, dy, EPS, norm)
    eager = qk_norm_rope_and_gradients(torch.float32, x, weight, angles, dy, EPS, norm)
    for got, theirs, exact in zip(ours, eager, truth, strict=True):
        assert_as_exact_as_eager(got, theirs.to(x.dtype), exact, RATIO)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_match_float64(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    assert_exact(kind, *inputs(kind, shape, dtype, device))


@pytest.mark.parametrize("table", ["cuda", "npu"])
@pytest.mark.parametrize("kind", ["norm and rotation", "norm alone"])
def test_the_tiles_of_real_chips_give_the_same(
    kind: str, table: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for configs in (kernel.FORWARD, kernel.BACKWARD):
        monkeypatch.setitem(configs, device.type, configs[table])
    if table == "npu":
        monkeypatch.setitem(kernel.ROTATED, device.type, kernel.ROTATED["npu"])
    assert_exact(kind, *inputs(kind, (2, 3, 24, 128), torch.float16, device))


def test_a_part_of_a_wider_projection_and_of_the_joined_tokens_lie_where_they_are(device: torch.device) -> None:
    x, weight, angles, dy = inputs("norm and rotation", (2, 5, 3, 8), torch.float32, device)
    how = how_of("norm and rotation", weight, angles)
    expected, expected_dx, expected_dweight = outcome("norm and rotation", x, weight, angles, dy)
    wide = torch.randn(2, 5, 60, device=device)
    part = wide[..., 24:48].unflatten(-1, (3, 8)).copy_(x)
    joined = torch.full((2, 3, 9, 8), math.nan, device=device).transpose(1, 2)  # heads first, as attention gives them
    assert torch.equal(kernel.forward(part, how, joined[:, 2:7]), expected)
    assert joined[:, :2].isnan().all() and joined[:, 7:].isnan().all()
    joined[:, 2:7] = dy
    dx, dweight = kernel.backward(joined[:, 2:7], part, how, torch.empty(2, 5, 3, 8, device=device), True)
    assert torch.equal(dx, expected_dx) and dweight is not None and torch.equal(dweight, expected_dweight)
    scattered = torch.stack((x, x), -1)[..., 0]  # a copy is made of one whose features do not lie side by side
    assert torch.equal(kernel.forward(scattered, how, torch.empty(2, 5, 3, 8, device=device)), expected)
    with pytest.raises(ValueError, match="out must have stride 1 in its last dimension, got strides"):
        kernel.forward(x, how, torch.empty(2, 5, 3, 8, 2, device=device)[..., 0])


def test_the_output_and_the_weight_may_have_other_dtypes(device: torch.device) -> None:
    """Under autocast: float32 queries and weights, half-precision attention."""
    x, weight, angles, dy = inputs("norm and rotation", (2, 5, 3, 8), torch.float32, device)
    how = how_of("norm and rotation", weight, angles)
    y = kernel.forward(x, how, torch.empty(2, 5, 3, 8, dtype=torch.float16, device=device))
    exact, *_ = outcome("norm and rotation", x, weight, angles, dy)
    assert torch.equal(y, exact.half())
    dx, dweight = kernel.backward(dy.half(), x, how, torch.empty(2, 5, 3, 8, device=device), True)
    again = kernel.backward(dy.half().float(), x, how, torch.empty(2, 5, 3, 8, device=device), True)
    assert torch.equal(dx, again[0]) and dweight is not None and again[1] is not None
    assert torch.equal(dweight, again[1]) and dweight.dtype == torch.float32


def test_the_weights_gradient_has_the_same_bits_each_time(device: torch.device) -> None:
    given = inputs("norm and rotation", (2, 33, 3, 8), torch.bfloat16, device)
    first, second = (outcome("norm and rotation", *given)[2] for _ in range(2))
    assert torch.equal(first, second)


def test_a_nan_stays_in_its_head(device: torch.device) -> None:
    x, weight, angles, dy = inputs("norm and rotation", (2, 3, 4, 8), torch.float32, device)
    x[1, 2, 3, 5] = math.nan
    y, dx, dweight = outcome("norm and rotation", x, weight, angles, dy)
    for found in (y, dx):
        assert found[1, 2, 3].isnan().all() and found.isnan().sum() == 8
    assert dweight.isnan().all()


@pytest.mark.parametrize("shape", [(0, 5, 3, 6), (2, 0, 3, 6), (2, 5, 0, 6)], ids=str)
def test_no_heads_give_empty_results(shape: tuple[int, ...], device: torch.device) -> None:
    y, dx, dweight = outcome("norm and rotation", *inputs("norm and rotation", shape, torch.float32, device))
    assert y.shape == dx.shape == shape and torch.equal(dweight, torch.zeros(6, device=device))


def test_a_tile_holds_whole_heads_and_an_ascend_is_asked_for_none_that_does_not_fit() -> None:
    assert kernel.launch("cuda", False, 24, 128, True)[1:] == (32, 128)
    assert kernel.launch("cuda", True, 2, 8192, False)[1:] == (1, 8192)
    assert kernel.launch("npu", True, 24, 64, True)[1:] == (8, 128)
    assert kernel.launch("npu", False, 24, 64, False)[1:] == (32, 64)
    assert kernel.launch("npu", False, 3, 10, True)[1:] == (8, 16)
    assert isinstance(kernel.launch("cpu", True, 3, 10, True)[0], LaunchConfig)


def test_a_head_too_wide_to_be_rotated_on_a_chip_is_left_to_the_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, angles, _ = inputs("norm and rotation", (1, 2, 3, 10), torch.float32, device)
    assert kernel.why_not(x, how_of("norm and rotation", weight, angles)) is None
    monkeypatch.setitem(kernel.WIDEST_ROTATED, device.type, 8)
    assert kernel.why_not(x, how_of("norm and rotation", weight, angles)) == "it rotates up to 8 features a head"
    assert kernel.why_not(x, how_of("norm alone", weight, None)) is None
