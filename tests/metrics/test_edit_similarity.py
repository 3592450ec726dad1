"""Scores of edits order what a person would: the target, half of it, nothing, another's edit, noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_aigc.errors import DataError
from lightning_aigc.metrics import EditSimilarity
from lightning_aigc.metrics.edit_similarity import edit_direction, left_alone
from tools.embedded import edits, world


@pytest.fixture(scope="module")
def metric() -> EditSimilarity:
    return EditSimilarity("embedded:clip")


@pytest.fixture(scope="module", params=[edits.SASH, edits.ORANGE])
def pairs(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """Sources and true targets, [8, 3, 64, 64] each."""
    found = edits.held_out(request.param, 8)
    source, target = (world.to_pixels([getattr(pair, key) for pair in found]) for key in ("source", "target"))
    return source, target


def test_the_scores_order_results_as_a_person_would(metric: EditSimilarity, pairs: tuple[Tensor, Tensor]) -> None:
    source, target = pairs
    noise = torch.rand(source.shape, generator=torch.Generator().manual_seed(0))
    results = {"target": target, "nothing": source, "another's": target.roll(1, 0), "noise": noise}
    found = {name: metric.scores(images, [*source], [*target]) for name, images in results.items()}
    direction, kept = ({name: float(each[key].mean()) for name, each in found.items()} for key in ("direction", "kept"))
    assert direction["target"] == pytest.approx(1, abs=1e-4) and direction["nothing"] == 0
    assert direction["target"] > direction["another's"] > direction["noise"]
    assert kept["nothing"] == 1 and kept["target"] > 0.98 > 0.9 > kept["another's"] > kept["noise"]
    both = {name: direction[name] + kept[name] for name in results}
    assert both["target"] > both["another's"] > both["noise"] and both["target"] > both["nothing"] > both["noise"]


def test_the_mean_over_updates_is_that_of_all_images(metric: EditSimilarity, pairs: tuple[Tensor, Tensor]) -> None:
    source, target = pairs
    half = (source + target) / 2
    metric.reset()
    metric.update(half[:3], [*source[:3]], [*target[:3]])
    metric.update(half[3:], [*source[3:]], [*target[3:]])
    wanted = metric.scores(half, [*source], [*target])
    for name, value in metric.compute().items():
        torch.testing.assert_close(value, wanted[name].mean())


def test_pixels_that_a_target_changes_are_told_from_compression_noise() -> None:
    source = torch.full((3, 64, 64), 0.5)
    target = (source + 0.02 * torch.randn(source.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    target[:, 16:32, 16:32] = 1.0
    mask = left_alone(source, target)
    assert not mask[18:30, 18:30].any() and mask[40:, 40:].float().mean() > 0.6


def test_a_source_of_another_size_is_compared_as_a_whole_image(metric: EditSimilarity) -> None:
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found = metric.scores(images, [images[0, :, :48]], [torch.rand(3, 64, 64)])
    own = metric.clip.embed_images(images) @ metric.clip.embed_images(images[:, :, :48]).T
    torch.testing.assert_close(found["kept"], own[0])


def test_an_image_that_is_not_finite_scores_as_black(metric: EditSimilarity, pairs: tuple[Tensor, Tensor]) -> None:
    source, target = (each[:1] for each in pairs)
    broken = metric.scores(torch.full_like(source, torch.nan), [*source], [*target])
    black = metric.scores(torch.zeros_like(source), [*source], [*target])
    assert all(torch.equal(broken[name], black[name]) for name in black)


def test_unequal_counts_are_one_sentence(metric: EditSimilarity) -> None:
    with pytest.raises(DataError, match="got 2 images, 1 sources and 2 targets; wanted as many of each"):
        metric.scores(torch.rand(2, 3, 64, 64), [torch.rand(3, 64, 64)], [*torch.rand(2, 3, 64, 64)])


def test_no_change_has_no_direction() -> None:
    same = torch.tensor([[1.0, 0.0]])
    assert edit_direction(same + 1e-6, same, torch.tensor([[0.0, 1.0]])).item() == 0
