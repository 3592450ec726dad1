"""Find images that are there twice: the same file by its content hash, the same look by a thumbnail.

Legend: N images, T values of a thumbnail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_aigc.data.images.image_file import PictureInfo
from lightning_aigc.data.index.checked_folder import CheckedFolder
from lightning_aigc.data.index.filenames import printable
from lightning_aigc.data.index.index_settings import IndexSettings
from lightning_aigc.data.index.sources import Picture
from lightning_aigc.data.report.findings import Finding, some
from lightning_aigc_kernels.numba_cache import compiled, helper


def duplicates(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Files of the same bytes, in one folder or in two of them."""
    by_content: dict[str, list[str]] = {}
    roles: dict[str, set[str]] = {}
    for folder in folders:
        for picture, info in folder.accepted:
            name = printable(picture.name)
            shown = name if folder.role == "train" else f"{name} ({folder.role}_data_dir)"
            by_content.setdefault(info.content_sha256, []).append(shown)
            roles.setdefault(info.content_sha256, set()).add(folder.role)
    groups = {content: names for content, names in by_content.items() if len(names) > 1}
    if groups:
        advice = "each copy counts as an image of its own; keep one of each"
        if any({"train", "validation"} <= roles[content] for content in groups):
            advice += ", or val_loss is of images that are trained on"
        listed = [some(names, " = ") for names in groups.values()]
        yield Finding(f"{len(groups)} images are there more than once", advice, listed)


def near_duplicates(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Images of the user's folder that look the same and are different files, such as a copy of another size."""
    for folder in folders:
        if folder.role != "train" or len(folder.accepted) < 2:
            continue
        by_content: dict[str, tuple[Picture, PictureInfo]] = {}
        for picture, info in folder.accepted:
            by_content.setdefault(info.content_sha256, (picture, info))
        different = list(by_content.values())
        thumbnails_NT = np.stack([np.frombuffer(info.thumbnail, np.uint8) for _, info in different])
        groups = look_alike_groups(thumbnails_NT)
        if groups:
            listed = [some((printable(different[row][0].name) for row in group), " ~ ") for group in groups]
            what = f"{sum(map(len, groups))} images look the same as another, in {len(groups)} groups"
            yield Finding(what, "if they are one image in two sizes or formats, keep the larger", listed)


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
        from lightning_aigc.data.images.duplicates import is_near

        near_C = np.empty(len(candidates_C), np.bool_)
        is_near(thumbnails_NT, row, candidates_C, largest_sum, NEAR_LARGEST_LEVELS, near_C)
    else:
        difference_CT = np.abs(thumbnails_NT[candidates_C].astype(np.int16) - thumbnails_NT[row].astype(np.int16))
        near_C = (difference_CT.sum(1) <= largest_sum) & (difference_CT.max(1, initial=0) <= NEAR_LARGEST_LEVELS)
    return candidates_C[near_C]


@helper
def _sum(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> np.int16:
    """Sum of at most 128 absolute differences: 16 bits hold it, which is twice as fast as 32."""
    total = np.int16(0)
    for place in range(len(one)):
        total = np.int16(total + abs(np.int16(one[place]) - np.int16(other[place])))
    return total


@compiled("void(uint8[:, ::1], int64, int64[::1], int64, int64, boolean[::1])")
def is_near(
    thumbnails_NT: NDArray[np.uint8],
    row: int,
    candidates_C: NDArray[np.int64],
    largest_sum: int,
    largest_value: int,
    near_C: NDArray[np.bool_],
) -> None:
    """Write whether each candidate's absolute differences from a row stay within their largest sum and value."""
    values = thumbnails_NT.shape[1]
    half = values // 2
    for at in range(len(candidates_C)):
        one, other = thumbnails_NT[row], thumbnails_NT[candidates_C[at]]
        total = _sum(one[:half], other[:half])
        if total <= largest_sum:  # most images differ enough in their upper half
            total += _sum(one[half:], other[half:])
        near_C[at] = total <= largest_sum
        if near_C[at]:
            for place in range(values):
                near_C[at] &= abs(np.int16(one[place]) - np.int16(other[place])) <= largest_value
