"""Class images in the user's buckets: in proportion, of near shape, and quickly for many of both."""

from __future__ import annotations

import math
import random
import time

import pytest

from lightning_aigc.data.index.prior import assign_class_pictures


def aspect(size: tuple[int, int]) -> float:
    return math.log(size[0] / size[1])


def by_all_pairs(
    sizes: list[tuple[int, int]], shapes: list[tuple[int, int]], quotas: list[int]
) -> list[tuple[int, int]]:
    """The nearest pair first, of all pairs."""
    pairs = sorted((abs(aspect(s) - aspect(b)), p, n) for p, s in enumerate(sizes) for n, b in enumerate(shapes))
    left, free, chosen = list(quotas), set(range(len(sizes))), []
    for _, picture, bucket in pairs:
        if picture in free and left[bucket]:
            free.discard(picture)
            left[bucket] -= 1
            chosen.append((picture, bucket))
    return sorted(chosen)


@pytest.mark.parametrize("seed", range(8))
def test_images_go_to_the_nearest_buckets_that_have_room(seed):
    rng = random.Random(seed)
    shapes = sorted({(8 * rng.randrange(8, 80), 8 * rng.randrange(8, 80)) for _ in range(12)}, key=aspect)
    shapes = [shape for at, shape in enumerate(shapes) if at == 0 or aspect(shape) != aspect(shapes[at - 1])]
    sizes = [(rng.randrange(64, 4000), rng.randrange(64, 4000)) for _ in range(6 * len(shapes))]
    assert assign_class_pictures(sizes, shapes, [1] * len(shapes)) == by_all_pairs(sizes, shapes, [6] * len(shapes))


def test_a_bucket_without_a_share_gets_the_image_of_the_nearest_shape():
    sizes = [(100, 100), (200, 100)]
    assert assign_class_pictures(sizes, [(64, 64), (128, 64), (96, 64)], [50, 49, 1]) == [(0, 0), (1, 1), (1, 2)]
    assert assign_class_pictures(sizes[:1], [(64, 64), (128, 64)], [1, 1]) == [(0, 0), (0, 1)]


def test_twenty_thousand_images_and_three_thousand_buckets_take_seconds():
    rng = random.Random(0)
    shapes = sorted({(8 * rng.randrange(8, 200), 8 * rng.randrange(8, 200)) for _ in range(3000)})
    sizes = [(rng.randrange(64, 4000), rng.randrange(64, 4000)) for _ in range(20_000)]
    began = time.process_time()
    chosen = assign_class_pictures(sizes, shapes, [1] * len(shapes))
    assert time.process_time() - began < 10, "all pairs take three minutes and gigabytes"
    assert len(chosen) == len(sizes) and {bucket for _, bucket in chosen} == set(range(len(shapes)))
