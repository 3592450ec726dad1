"""Groups of images that look alike: the same as comparing all pairs, without keeping pairs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from lightning_aigc.data.images.duplicates import (
    COMPILED_FROM,
    NEAR_LARGEST_LEVELS,
    NEAR_MEAN_LEVELS,
    look_alike_groups,
)

VALUES = 8 * 8 * 3


def groups_by_pairs(thumbnails_NT: np.ndarray) -> list[list[int]]:
    """The groups that joining every near pair gives."""
    group_of = list(range(len(thumbnails_NT)))
    for row, thumbnail in enumerate(thumbnails_NT):
        difference = np.abs(thumbnails_NT.astype(int) - thumbnail.astype(int))
        near = (difference.mean(1) <= NEAR_MEAN_LEVELS) & (difference.max(1) <= NEAR_LARGEST_LEVELS)
        joined = {group_of[other] for other in np.flatnonzero(near)} | {group_of[row]}
        group_of = [min(joined) if group in joined else group for group in group_of]
    found: dict[int, list[int]] = {}
    for row, group in enumerate(group_of):
        found.setdefault(group, []).append(row)
    return sorted(rows for rows in found.values() if len(rows) > 1)


@pytest.mark.parametrize("scenes", [3, 40])
def test_groups_are_those_that_all_near_pairs_join(scenes):
    random = np.random.default_rng(scenes)
    ground = random.integers(20, 230, (scenes, VALUES))[random.integers(0, scenes, 300)]
    noise = random.integers(-2, 3, ground.shape) * random.integers(0, 3, (300, 1))
    drift = np.arange(300)[:, None] % 30 - 15  # a chain: neighbours are near, its ends are not
    thumbnails = np.clip(ground + noise + drift, 0, 255).astype(np.uint8)
    groups = look_alike_groups(thumbnails)
    assert groups == groups_by_pairs(thumbnails)
    assert 1 < len(groups) < 150


def test_the_compiled_comparison_finds_the_same_groups(monkeypatch):
    random = np.random.default_rng(0)
    ground = random.integers(0, 256, (60, VALUES))[random.integers(0, 60, 1500)]
    changed = np.where(random.random(ground.shape) < 0.02, random.integers(-9, 10, ground.shape), 0)
    thumbnails = np.clip(ground + changed, 0, 255).astype(np.uint8)
    by_numpy = look_alike_groups(thumbnails)
    monkeypatch.setattr("lightning_aigc.data.images.duplicates.COMPILED_FROM", 1)
    assert look_alike_groups(thumbnails) == by_numpy
    assert len(by_numpy) > 30 and sum(map(len, by_numpy)) < 1500, "some differ by 9 in one value"


def test_many_frames_of_one_scene_are_one_group_and_their_pairs_are_not_kept():
    count = 20 * COMPILED_FROM
    random = np.random.default_rng(0)
    frames = (random.integers(10, 240, VALUES) + random.integers(-1, 2, (count, VALUES))).astype(np.uint8)
    tracemalloc.start()
    try:
        assert look_alike_groups(frames) == [list(range(count))]
        assert tracemalloc.get_traced_memory()[1] < 100e6, "200 million pairs take gigabytes"
    finally:
        tracemalloc.stop()


def test_the_report_names_groups_with_their_first_files(tools, make, folder):
    image = tools.picture(128, 128, seed=5)
    for number in range(8):
        image.putpixel((number, 0), (0, 0, 0))
        tools.save(folder / f"frame{number}.png", image)
    tools.save(folder / "other.png", tools.picture(seed=6))
    report = make().report()
    assert "8 images look the same as another, in 1 groups" in report
    assert "    frame0.png ~ frame1.png ~ frame2.png ~ frame3.png ~ frame4.png and 3 more" in report
    assert "other.png" not in report
