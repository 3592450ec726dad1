"""Groups of thumbnails that look alike: only those of about the same mean are compared, and memory is linear.

Legend: N images, T values of a thumbnail, C candidates.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NEAR_MEAN_LEVELS = 1.5
"""Mean difference of two thumbnails, of 255, up to which images count as the same: another size or file format."""
NEAR_LARGEST_LEVELS = 8
"""Largest difference of one value of theirs."""
COMPILED_FROM = 1024
"""Candidates from which the compiled comparison is used; loading it takes longer than comparing a small folder."""


def look_alike_groups(thumbnails_NT: NDArray[np.uint8]) -> list[list[int]]:
    """Groups of two and more thumbnails, each within both limits of another of its group; rows in order.

    A thumbnail leaves the search when its group is known, so a folder of one image's copies takes one comparison each.
    """
    means_N = thumbnails_NT.mean(1)
    order_N = np.argsort(means_N, kind="stable")
    thumbnails_NT, means_N = np.ascontiguousarray(thumbnails_NT[order_N]), means_N[order_N]
    # Means differ by no more than the mean difference of the values.
    lows = np.searchsorted(means_N, means_N - NEAR_MEAN_LEVELS, side="left").tolist()
    highs = np.searchsorted(means_N, means_N + NEAR_MEAN_LEVELS, side="right").tolist()
    is_free_N = np.ones(len(means_N), np.bool_)
    groups = []
    for first in range(len(means_N)):
        if not is_free_N[first]:
            continue
        is_free_N[first] = False
        group = [first]
        for row in group:  # it grows while it is read
            candidates_C = np.flatnonzero(is_free_N[lows[row] : highs[row]]) + lows[row]
            near = _near(thumbnails_NT, row, candidates_C)
            is_free_N[near] = False
            group += near.tolist()
        if len(group) > 1:
            groups.append(sorted(order_N[group].tolist()))
    return sorted(groups)


def _near(thumbnails_NT: NDArray[np.uint8], row: int, candidates_C: NDArray[np.int64]) -> NDArray[np.int64]:
    """The candidates within both limits of a row."""
    largest_sum = int(NEAR_MEAN_LEVELS * thumbnails_NT.shape[1])
    if len(candidates_C) >= COMPILED_FROM:
        from lightning_aigc.data.images.near_thumbnails import is_near

        near_C = np.empty(len(candidates_C), np.bool_)
        is_near(thumbnails_NT, row, candidates_C, largest_sum, NEAR_LARGEST_LEVELS, near_C)
    else:
        difference_CT = np.abs(thumbnails_NT[candidates_C].astype(np.int16) - thumbnails_NT[row].astype(np.int16))
        near_C = (difference_CT.sum(1) <= largest_sum) & (difference_CT.max(1, initial=0) <= NEAR_LARGEST_LEVELS)
    return candidates_C[near_C]
