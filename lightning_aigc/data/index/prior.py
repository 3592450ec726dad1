"""Assign class images (prior preservation) to the buckets of the user's images, in memory and time that grow with both.

The crop of an image in a bucket grows with the difference of the logarithms of their aspect ratios.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence


def assign_class_pictures(
    sizes: Sequence[tuple[int, int]], shapes: Sequence[tuple[int, int]], weights: Sequence[int]
) -> list[tuple[int, int]]:
    """Pairs (image, bucket): buckets filled in proportion to their weights, with the nearest aspect ratios.

    Every bucket gets at least one image; with fewer images than buckets some images are in several.
    """
    total = sum(weights)
    exact = [len(sizes) * weight / total for weight in weights]
    quotas = [int(share) for share in exact]
    by_rest = sorted(range(len(shapes)), key=lambda b: (quotas[b] - exact[b], b))
    for bucket in by_rest[: len(sizes) - sum(quotas)]:
        quotas[bucket] += 1
    aspects = [math.log(width / height) for width, height in sizes]
    of_buckets = [math.log(width / height) for width, height in shapes]
    chosen = _nearest_first(aspects, of_buckets, quotas)
    served = {bucket for _, bucket in chosen}
    by_aspect = sorted(range(len(sizes)), key=lambda image: (aspects[image], image))
    known = [aspects[image] for image in by_aspect]
    for bucket in set(range(len(shapes))) - served:
        at = bisect.bisect_left(known, of_buckets[bucket])
        beside = by_aspect[max(0, at - 1) : at + 1]
        chosen.append((min(beside, key=lambda image: (abs(aspects[image] - of_buckets[bucket]), image)), bucket))
    return sorted(chosen)


def _nearest_first(
    aspects: Sequence[float], of_buckets: Sequence[float], quotas: Sequence[int]
) -> list[tuple[int, int]]:
    """Pairs (image, bucket), the nearest of all first, until each image has a bucket; quotas are kept."""
    order = sorted((b for b, quota in enumerate(quotas) if quota), key=lambda b: (of_buckets[b], b))
    known, left = [of_buckets[b] for b in order], [quotas[b] for b in order]
    # From a place to the next that is free, on each side; places are counted from 1, and the ends are always free.
    below, above = list(range(len(order) + 2)), list(range(len(order) + 2))

    def nearest(image: int) -> tuple[float, int, int]:
        at = bisect.bisect_left(known, aspects[image]) + 1
        beside = (_free(above, min(at, len(order) + 1)), _free(below, at - 1))
        return min(
            (abs(aspects[image] - known[place - 1]), image, place) for place in beside if 1 <= place <= len(order)
        )

    heap = [nearest(image) for image in range(len(aspects))]
    heapq.heapify(heap)
    chosen = []
    while heap:
        _, image, place = heapq.heappop(heap)
        if not left[place - 1]:  # full since: the next nearest
            heapq.heappush(heap, nearest(image))
            continue
        left[place - 1] -= 1
        chosen.append((image, order[place - 1]))
        if not left[place - 1]:
            below[place], above[place] = place - 1, place + 1
    return chosen


def _free(towards: list[int], place: int) -> int:
    """The first free place from this one on, with the way there shortened for the next search."""
    way = []
    while towards[place] != place:
        way.append(place)
        place = towards[place]
    for passed in way:
        towards[passed] = place
    return place
