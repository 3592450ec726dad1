"""modulated_norm and gated_residual in Triton against float64 autograd."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fakes.accuracy import assert_as_exact_as_eager, modulated_norm_and_gradients
from lightning_aigc_kernels.modulated_norm import kernel, token_sums
from lightning_aigc_kernels.modulated_norm.modulation import Modulation, Needs

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of the largest error. Over six seeds the median is 0.4 to 0.9; the worst at 131 channels is 1.8, at five 3.2, where
# two terms of a gradient nearly cancel.
RATIO = 4.0
SHAPES = [(2, 7, 131), (1, 33, 5), (3, 1, 64), (2, 37, 1)]
VARIANTS = {
    "layer": ("layer",),
    "rms": ("rms",),
    "layer scale shift": ("layer", "scale", "shift"),
    "rms scale weight": ("rms", "scale", "weight"),
    "layer all": ("layer", "scale", "shift", "weight", "bias"),
    "rms bias": ("rms", "bias"),
    "gate": ("none", "gate", "residual"),
    "rms gate weight": ("rms", "gate", "weight", "residual"),
    "rms weight": ("rms", "weight", "residual"),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def inputs(variant: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    samples, _, channels = shape
    sizes = {"residual": shape, "weight": (channels,), "bias": (channels,)}
    given = {"x": torch.randn(shape) * 2 + 3}
    given |= {name: torch.randn(sizes.get(name, (samples, channels))) for name in VARIANTS[variant][1:]}
    return {name: tensor.to(dtype).to(device) for name, tensor in given.items()}


def modulation(variant: str, given: dict[str, Tensor]) -> Modulation:
    scale = given.get("gate", given.get("scale"))
    tensors = scale, *(given.get(name) for name in ("shift", "weight", "bias"))
    return Modulation(*tensors, VARIANTS[variant][0], EPS, "gate" not in given)


def outcome(variant: str, given: dict[str, Tensor], dy: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The kernels' outputs, with all gradients but the residual's."""
    x, of = given["x"], modulation(variant, given)
    y = kernel.forward(x, of, dtype or x.dtype, given.get("residual"))
    needs = Needs(True, *(tensor is not None for tensor in of.tensors))
    gradients = kernel.backward(dy, x, of, x.dtype, needs)
    names = ("x", "gate" if "gate" in given else "scale", "shift", "weight", "bias")
    return {"y": y} | {name: g for name, g in zip(names, gradients, strict=True) if g is not None}


def assert_exact(ours: dict[str, Tensor], variant: str, given: dict[str, Tensor], dy: Tensor) -> None:
    truth, eager = (
        modulated_norm_and_gradients(dtype, VARIANTS[variant][0], EPS, given, dy)
        for dtype in (torch.float64, torch.float32)
    )
    assert ours.keys() == truth.keys() - {"residual"}
    for name, tensor in ours.items():
        assert_as_exact_as_eager(tensor, eager[name].to(tensor.dtype), truth[name], RATIO)


@variants
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_match_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, variant: str, device: torch.device
) -> None:
    given = inputs(variant, shape, dtype, device)
    dy = torch.randn(shape).to(dtype).to(device)
    assert_exact(outcome(variant, given, dy), variant, given, dy)


@pytest.mark.parametrize("table", ["cuda", "npu"])
@pytest.mark.parametrize("variant", ["layer all", "rms gate weight"])
def test_the_tiles_of_real_chips_give_the_same(
    variant: str, table: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(variant, (2, 70, 1500), torch.float16, device)
    dy = torch.randn(2, 70, 1500).half().to(device)
    tables: list[dict[str, object]] = [kernel.FORWARD, kernel.BACKWARD, token_sums.SUMS, token_sums.GRADIENTS]  # type: ignore[list-item]
    tables += [token_sums.MOST_COLUMNS, token_sums.WANTED_PROGRAMS]  # type: ignore[list-item]
    for configs in tables:
        monkeypatch.setitem(configs, device.type, configs[table])
    assert_exact(outcome(variant, given, dy), variant, given, dy)


@variants
def test_slices_of_tokens_and_of_wider_tensors_give_the_same(variant: str, device: torch.device) -> None:
    # Four tokens a tile.
    given = inputs(variant, (2, 7, 13), torch.float32, device)
    dy = torch.randn(2, 7, 13).to(device)

    def sliced(tensor: Tensor) -> Tensor:
        more = next(widths)  # each tensor has strides of its own
        wide = torch.full([size + more for size in tensor.shape], math.nan, device=device)
        part = wide[tuple(slice(2, 2 + size) for size in tensor.shape)]
        return part.copy_(tensor)

    def scattered(tensor: Tensor) -> Tensor:
        return (
            tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.transpose(-1, 0).contiguous().transpose(-1, 0)
        )

    widths = itertools.count(3)
    expected = outcome(variant, given, dy)
    for lay in (sliced, scattered):
        ours = outcome(variant, {name: lay(tensor) for name, tensor in given.items()}, lay(dy))
        for name, tensor in ours.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("variant", ["layer scale shift", "rms gate weight"])
def test_output_and_gradient_are_rounded_once_to_other_dtypes(variant: str, device: torch.device) -> None:
    given = inputs(variant, (2, 7, 33), torch.float32, device)
    dy = torch.randn(2, 7, 33).to(torch.bfloat16).to(device)
    assert_exact(outcome(variant, given, dy, torch.bfloat16), variant, given, dy)
    given = {name: tensor.bfloat16() if name == "x" else tensor for name, tensor in given.items()}
    assert_exact(outcome(variant, given, dy.float(), torch.float32), variant, given, dy)


@pytest.mark.parametrize("variant", ["layer all", "rms gate weight", "gate"])
def test_each_gradient_alone_is_the_same(variant: str, device: torch.device) -> None:
    given = inputs(variant, (2, 7, 33), torch.float32, device)
    dy, of = torch.randn(2, 7, 33).to(device), modulation(variant, given)
    all_needed = kernel.backward(dy, given["x"], of, torch.float32, Needs(True, *(t is not None for t in of.tensors)))
    for position, expected in enumerate(all_needed):
        if expected is not None:
            needs = Needs(*(position == other for other in range(5)))
            reads_x = position in (1, 3) or (position == 0 and of.norm != "none")
            gradients = kernel.backward(dy, given["x"] if reads_x else None, of, torch.float32, needs)
            assert [gradient is not None for gradient in gradients] == list(needs)
            assert torch.equal(gradients[position], expected)  # type: ignore[arg-type]


def test_the_sums_are_the_same_every_time(device: torch.device) -> None:
    given = inputs("layer all", (3, 65, 40), torch.float32, device)
    dy = torch.randn(3, 65, 40).to(device)
    first, second = outcome("layer all", given, dy), outcome("layer all", given, dy)
    assert all(torch.equal(first[name], second[name]) for name in first)


@variants
def test_a_nan_is_seen_and_stays_in_its_token(variant: str, device: torch.device) -> None:
    given = inputs(variant, (2, 7, 33), torch.float32, device)
    given["x"][1, 2, 3] = math.nan
    ours = outcome(variant, given, torch.randn(2, 7, 33).to(device))
    spoiled = {(1, 2)}
    assert {tuple(place[:2]) for place in ours["y"].isnan().nonzero().tolist()} == spoiled
    if VARIANTS[variant][0] != "none":
        assert {tuple(place[:2]) for place in ours["x"].isnan().nonzero().tolist()} == spoiled


def test_a_large_mean_costs_no_more_than_eager(device: torch.device) -> None:
    given = inputs("layer scale shift", (2, 7, 131), torch.float32, device)
    given["x"] += 1000
    dy = torch.randn(2, 7, 131).to(device)
    assert_exact(outcome("layer scale shift", given, dy), "layer scale shift", given, dy)


def test_a_residual_that_is_the_branch_itself_is_added(device: torch.device) -> None:
    x, gate = torch.randn(2, 7, 33, device=device), torch.randn(2, 33, device=device)
    out = kernel.forward(x, Modulation(gate, None, None, None, "none", EPS, False), torch.float32, x)
    torch.testing.assert_close(out, x + gate[:, None] * x)


@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6), (2, 5, 0)], ids=str)
def test_empty_inputs_give_empty_results_and_zero_sums(shape: tuple[int, int, int], device: torch.device) -> None:
    given = inputs("layer all", shape, torch.float32, device)
    ours = outcome("layer all", given, torch.ones(shape, device=device))
    assert ours["y"].shape == ours["x"].shape == shape
    for name in ("scale", "shift", "weight", "bias"):
        assert torch.equal(ours[name], torch.zeros_like(given[name]))


def test_what_cannot_be_served_is_refused_with_the_reason(device: torch.device) -> None:
    given = inputs("layer scale shift", (2, 7, 33), torch.float32, device)
    given["scale"] = given["scale"].double()
    with pytest.raises(ValueError, match=r"scale must be float32, float16 or bfloat16, got torch\.float64"):
        kernel.forward(given["x"], modulation("layer scale shift", given), torch.float32)
