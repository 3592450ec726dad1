"""Pair each image with its condition: the file of its name in a folder, or the one that metadata.jsonl lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_aigc.data.images.image_file import (
    PictureInfo,
    PictureRejectedError,
    contrast,
    load_condition,
    load_mask,
    looks_like_a_picture,
)
from lightning_aigc.data.index.checked_folder import CheckedFolder
from lightning_aigc.data.index.filenames import printable
from lightning_aigc.data.index.index_settings import IndexSettings
from lightning_aigc.data.index.sources import Picture
from lightning_aigc.data.report.findings import Finding
from lightning_aigc.data.report.report import DataReport
from lightning_aigc.errors import DataError

SHAPE_TOLERANCE = 0.02
"""Share by which the aspect ratio of a condition may differ from its image's, for rounding to whole pixels."""
REMEDY = "give every image a condition of its name in data.init_args.conditioning_data_dir"


def pair_conditions(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Set `condition` of the accepted images; yields what is missing or cannot be used."""
    folder = settings.condition_folder
    if folder is None and all(p.condition is None for each in folders for p in each.used):
        return
    by_name: dict[str, Path] = {}
    if folder is not None:
        if not folder.is_dir():
            said = f"conditioning_data_dir {printable(folder)} does not exist"
            yield Finding(said, "set data.init_args.conditioning_data_dir to a folder", stops=True)
            return
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.startswith(".") and looks_like_a_picture(path):
                by_name[path.relative_to(folder).with_suffix("").as_posix()] = path
    for each in folders:
        accepted = [(picture, info) for picture, info in each.accepted]
        for picture, _ in accepted:
            if folder is not None:
                picture.condition = by_name.pop(Path(picture.name).with_suffix("").as_posix(), None)
        missing = [picture.name for picture, _ in accepted if picture.condition is None]
        if missing:
            names = ", ".join(printable(name) for name in missing[:3])
            said = f"{len(missing)} of {len(accepted)} images in {each.shown} have no condition, such as {names}"
            yield Finding(said, REMEDY, stops=True)
        for problem in filter(None, (_problem(picture, info) for picture, info in accepted)):
            yield Finding(problem, "make it again from its image, or leave the image out", stops=True)
    if by_name:
        names = ", ".join(printable(path) for path in list(by_name.values())[:3])
        yield Finding(f"{len(by_name)} conditions match no image, such as {names}", REMEDY, stops=True)


def _problem(picture: Picture, info: PictureInfo) -> str | None:
    if picture.condition is None:
        return None
    shown = f"the condition {printable(picture.condition)}"
    try:
        image = load_condition(picture.condition)
    except (Exception, PictureRejectedError) as error:
        return f"{shown} cannot be read: {error}"
    if abs(image.width * info.height / (image.height * info.width) - 1) > SHAPE_TOLERANCE:
        return (
            f"{shown} is {image.width} x {image.height} and its image {printable(picture.name)} {info.width} x"
            f" {info.height}: another shape, so their crops would not fit"
        )
    if contrast(image) == 0:
        rgb = image.getpixel((0, 0))
        colour = "black" if rgb == (0, 0, 0) else "white" if rgb == (255, 255, 255) else f"of one colour {rgb}"
        return f"{shown} is {colour} everywhere: it says nothing about its image"
    return None


def find_masks(
    folder: Path | None, use_alpha_mask: bool, names: Sequence[str], report: DataReport
) -> list[Path | None]:
    """The mask file with each image's name, suffix aside; None for an image without a mask.

    Raises: DataError if the folder does not exist, no mask matches, or a mask cannot be used.
    """
    if use_alpha_mask and folder is None:
        report.notes.append("masks: the alpha channel of each image that has one")
    if folder is None:
        return [None] * len(names)
    if not folder.is_dir():
        raise DataError(f"mask_dir {printable(folder)} does not exist; set data.init_args.mask_dir")
    by_name: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        stem = path.relative_to(folder).with_suffix("").as_posix()
        if path.is_file() and not path.name.startswith(".") and looks_like_a_picture(path):
            if stem in by_name:
                raise DataError(f"two masks have one name: {printable(by_name[stem])} and {printable(path)}; keep one")
            by_name[stem] = path
    masks = [by_name.get(Path(name).with_suffix("").as_posix()) for name in names]
    report.masks = sum(mask is not None for mask in masks)
    if not report.masks:
        raise DataError(
            f"no mask in {printable(folder)} has the name of an image, such as "
            f"{printable(Path(names[0]).with_suffix('.png'))}; rename them or remove data.init_args.mask_dir"
        )
    for mask in masks:
        if mask is not None:
            _check_mask(mask)
    return masks


def _check_mask(path: Path) -> None:
    try:
        extrema = load_mask(path).getextrema()
    except (Exception, PictureRejectedError) as error:
        raise DataError(f"the mask {printable(path)} cannot be read: {error}; make it again or remove it") from error
    if extrema[1] == 0:
        raise DataError(f"the mask {printable(path)} is black everywhere: nothing to learn; white is what gets learned")
