"""Find images that are there twice: the same file by its content hash, the same look by a thumbnail.

Legend: N images, T values of a thumbnail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lightning_aigc.data.images.image_file import PictureInfo
from lightning_aigc.data.images.look_alikes import look_alike_groups
from lightning_aigc.data.index.checked_folder import CheckedFolder
from lightning_aigc.data.index.filenames import printable
from lightning_aigc.data.index.index_settings import IndexSettings
from lightning_aigc.data.index.sources import Picture
from lightning_aigc.data.report.findings import Finding, some


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
