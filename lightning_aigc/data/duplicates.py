"""Find pictures that are there twice: the same file by its content hash, the same look by a thumbnail.

Legend: N pictures, T values of a thumbnail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lightning_aigc.data.checked_folder import CheckedFolder
from lightning_aigc.data.findings import Finding
from lightning_aigc.data.index_settings import IndexSettings
from lightning_aigc.data.names import printable

NEAR_MEAN_LEVELS = 1.5
"""Mean difference of two thumbnails, of 255, up to which pictures count as the same: another size or file format."""
NEAR_LARGEST_LEVELS = 8
"""Largest difference of one value of theirs."""


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
        advice = "each copy counts as a picture of its own; keep one of each"
        if any({"train", "validation"} <= roles[content] for content in groups):
            advice += ", or val_loss is of pictures that are trained on"
        listed = [" = ".join(names) for names in groups.values()]
        yield Finding(f"{len(groups)} pictures are there more than once", advice, listed)


def near_duplicates(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Pictures of the user's folder that look the same and are different files, such as a copy of another size."""
    for folder in folders:
        if folder.role != "train" or len(folder.accepted) < 2:
            continue
        names = [printable(picture.name) for picture in folder.used]
        contents = [info.content_sha256 for _, info in folder.accepted]
        thumbnails_NT = np.stack([np.frombuffer(info.thumbnail, np.uint8) for _, info in folder.accepted])
        pairs = [(a, b) for a, b in _near_pairs(thumbnails_NT) if contents[a] != contents[b]]
        if pairs:
            listed = [f"{names[a]} ~ {names[b]}" for a, b in pairs]
            what = f"{len(pairs)} pairs of pictures look the same"
            yield Finding(what, "if they are one picture in two sizes or formats, keep the larger", listed)


def _near_pairs(thumbnails_NT: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of thumbnails within both limits, in order. Their means differ by no more than their values do."""
    means_N = thumbnails_NT.mean(1)
    order = np.argsort(means_N, kind="stable")
    ends = np.searchsorted(means_N[order], means_N[order] + NEAR_MEAN_LEVELS, side="right")
    found = []
    for at, (row, end) in enumerate(zip(order.tolist(), ends.tolist(), strict=True)):
        others = order[at + 1 : end]
        difference = np.abs(thumbnails_NT[others].astype(np.int16) - thumbnails_NT[row].astype(np.int16))
        if len(others):
            near = (difference.mean(1) <= NEAR_MEAN_LEVELS) & (difference.max(1) <= NEAR_LARGEST_LEVELS)
            found += [(min(row, other), max(row, other)) for other in others[near].tolist()]
    return sorted(found)
