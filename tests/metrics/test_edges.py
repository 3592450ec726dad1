"""Canny edges and EdgeFidelity: where edges are, what a shift costs, and what ranks add up to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lightning_aigc.embedded import resolve
from lightning_aigc.metrics import EdgeFidelity, canny, edge_magnitude


def pictures(count: int = 16) -> Tensor:
    files = sorted(resolve("embedded:prior").glob("*.png"))[:count]
    return torch.stack([torch.from_numpy(np.array(Image.open(f).convert("RGB"))).permute(2, 0, 1) for f in files]) / 255


def square(side: int = 32) -> Tensor:
    picture = torch.zeros(1, 3, side, side)
    picture[..., 8:24, 8:24] = 1
    return picture


def test_edges_lie_on_the_border_of_a_square_and_are_thin() -> None:
    edges = canny(square())[0, 0]
    rows, columns = edges.nonzero().unbind(1)
    on_border = (((rows - 7.5).abs() < 2) | ((rows - 23.5).abs() < 2)) | (
        ((columns - 7.5).abs() < 2) | ((columns - 23.5).abs() < 2)
    )
    assert on_border.all()
    assert 40 <= len(rows) <= 64 + 4  # one pixel on each of four sides of 16
    assert set(edges.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_a_step_between_two_pixels_is_one_edge_whatever_a_device_rounds(noise: float) -> None:
    side = square()
    rounded = side * (1 + noise * torch.randn(side.shape, generator=torch.Generator().manual_seed(0)))
    for turned in (rounded, rounded.transpose(-1, -2)):
        edges = canny(turned)[0, 0]
        assert (edges[12:20].sum(1) == 2).all() and (edges[:, 12:20].sum(0) == 2).all()  # one on each side
        assert torch.equal(edges, canny(square())[0, 0])


def test_a_weak_edge_counts_only_where_it_touches_a_strong_one() -> None:
    picture = torch.zeros(1, 1, 32, 64)
    picture[..., 16:, :32] = 0.2 * torch.linspace(1, 0.1, 32)  # fades out to the right
    alone = torch.zeros(1, 1, 32, 64)
    alone[..., 16:, 20:32] = 0.03
    assert canny(alone, 0.1, 0.2).sum() == 0
    strict, grown = canny(picture, 0.2, 0.2), canny(picture, 0.1, 0.2)
    assert grown.sum() > strict.sum() > 0
    assert ((grown - strict) >= 0).all()


def test_a_flipped_picture_has_flipped_edges_and_grey_equals_its_three_channels() -> None:
    given = pictures()
    first, second = canny(given), canny(given.flip(-1)).flip(-1)
    assert (first != second).float().mean() < 1e-3  # ties of rounding
    grey = (given * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    assert torch.equal(canny(grey), first)


def test_the_magnitude_has_the_gradient_of_differences() -> None:
    picture = pictures(1)[..., 20:28, 20:28].double().requires_grad_(True)

    def mean_of_squares(given: Tensor) -> Tensor:
        return edge_magnitude(given).square().mean()

    (gradient,) = torch.autograd.grad(mean_of_squares(picture), picture)
    step = torch.randn(picture.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        change = (mean_of_squares(picture + 1e-2 * step) - mean_of_squares(picture - 1e-2 * step)) / 2e-2
    assert float((gradient * step).sum()) == pytest.approx(float(change), rel=2e-2)
    assert bool(
        torch.isfinite(
            torch.autograd.grad(edge_magnitude(flat := torch.zeros_like(picture, requires_grad=True)).sum(), flat)[0]
        ).all()
    )


def test_the_edges_are_those_of_scikit_image() -> None:
    feature = pytest.importorskip("skimage.feature", reason="scikit-image is not installed")
    given = pictures(32)
    grey = (given * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1).numpy()
    found = [feature.canny(one, sigma=1.0, low_threshold=0.1, high_threshold=0.2) for one in grey]
    theirs = torch.from_numpy(np.stack(found))[:, None].float()
    ours = canny(given)
    assert 2 * float((ours * theirs).sum() / (ours.sum() + theirs.sum())) > 0.95


def test_a_shift_of_one_pixel_is_forgiven_and_another_picture_is_not() -> None:
    given = pictures()
    tolerant, strict = EdgeFidelity(), EdgeFidelity(tolerance=0)
    for metric in (tolerant, strict):
        metric.update(given.roll(1, -1), given)
    kept, lost = tolerant.compute(), strict.compute()
    assert float(kept["edge_f1"]) > 0.98
    assert float(lost["edge_f1"]) < 0.7
    assert float(kept["edge_f1_floor"]) < 0.65
    assert float(kept["edge_f1_normalised"]) > 0.9
    assert float(kept["edge_f1_ceiling"]) == 1
    equal = EdgeFidelity()
    equal.update(given, given)
    assert float(equal.compute()["edge_ssim"]) == pytest.approx(1, abs=1e-6)
    assert float(kept["edge_ssim"]) < 0.9


def test_the_ceiling_is_the_round_trip_and_counts_add_up_over_batches() -> None:
    given = pictures(8)
    blurred = torch.nn.functional.avg_pool2d(given, 3, 1, 1)
    whole, halves = EdgeFidelity(), EdgeFidelity()
    whole.update(blurred, given, blurred)
    for part in (slice(0, 4), slice(4, 8)):
        halves.update(blurred[part], given[part], blurred[part])
    first, second = whole.compute(), halves.compute()
    assert float(first["edge_f1"]) == float(first["edge_f1_ceiling"]) < 1
    for name in ("edge_f1", "edge_f1_ceiling", "edge_ssim"):
        assert float(first[name]) == pytest.approx(float(second[name]), rel=1e-6)
    # What two ranks would add up.
    states = [dict(m._copy_state_dict()) for m in (whole, halves)]
    assert all(set(state) >= {"counts", "ssim_sum", "pictures"} for state in states)
    assert torch.allclose(states[0]["counts"][0], states[1]["counts"][0])


def test_pictures_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="as many, of one size"):
        EdgeFidelity().update(torch.zeros(2, 3, 16, 16), torch.zeros(2, 3, 32, 32))
    with pytest.raises(ValueError, match="tolerance >= 0"):
        EdgeFidelity(tolerance=-1)
