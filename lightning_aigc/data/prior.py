"""Assign class pictures (prior preservation) to the buckets of the user's pictures."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_aigc.data.buckets import place_in


def assign_class_pictures(
    sizes: Sequence[tuple[int, int]], shapes: Sequence[tuple[int, int]], weights: Sequence[int]
) -> list[tuple[int, int]]:
    """Pairs (picture, bucket): buckets filled in proportion to their weights, with the nearest aspect ratios.

    Every bucket gets at least one picture; with fewer pictures than buckets some pictures are in several.
    """
    total = sum(weights)
    exact = [len(sizes) * weight / total for weight in weights]
    quotas = [int(share) for share in exact]
    by_rest = sorted(range(len(shapes)), key=lambda b: (quotas[b] - exact[b], b))
    for bucket in by_rest[: len(sizes) - sum(quotas)]:
        quotas[bucket] += 1

    def mismatch(picture: int, bucket: int) -> float:
        (width, height), shape = sizes[picture], shapes[bucket]
        return place_in(width, height, shape).cropped_fraction

    pairs = sorted(
        ((mismatch(p, b), p, b) for p in range(len(sizes)) for b in range(len(shapes))),
    )
    free, chosen = set(range(len(sizes))), []
    for _, picture, bucket in pairs:
        if picture in free and quotas[bucket] > 0:
            free.discard(picture)
            quotas[bucket] -= 1
            chosen.append((picture, bucket))
    served = {bucket for _, bucket in chosen}
    for bucket in range(len(shapes)):
        if bucket not in served:
            nearest = min(range(len(sizes)), key=lambda picture: (mismatch(picture, bucket), picture))
            chosen.append((nearest, bucket))
    return sorted(chosen)
