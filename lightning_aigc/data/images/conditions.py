"""Pair each image with its condition or mask: the file of its name in a folder, or one that metadata.jsonl lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_aigc.data.images.image_file import (
    PictureInfo,
    PictureRejectedError,
    contrast,
    has_alpha,
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

SHAPE_TOLERANCE = 0.02
"""Share by which the aspect ratio of a condition, source or mask may differ from its image's, for rounding to whole
pixels."""
UNMATCHED = "remove these {}, or give each the name of its image"
REMEDY = "give every image a condition of its name in data.init_args.conditioning_data_dir"
LISTED_REMEDY = "list a conditioning_image for every image in metadata.jsonl"


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
            yield Finding(said, REMEDY if folder is not None else LISTED_REMEDY, stops=True)
        for problem in filter(None, (_problem(picture, info) for picture, info in accepted)):
            yield Finding(problem, "make it again from its image, or leave the image out", stops=True)
    if by_name:
        names = ", ".join(printable(path) for path in list(by_name.values())[:3])
        said = f"{len(by_name)} conditions match no image, such as {names}"
        yield Finding(said, UNMATCHED.format("conditions"), stops=True)


def _problem(picture: Picture, info: PictureInfo) -> str | None:
    if picture.condition is None:
        return None
    shown = f"the condition {printable(picture.condition)}"
    try:
        image = load_condition(picture.condition)
    except (Exception, PictureRejectedError) as error:
        return f"{shown} cannot be read: {error}"
    if problem := shape_problem(shown, image.size, picture, info):
        return problem
    if contrast(image) == 0:
        rgb = image.getpixel((0, 0))
        colour = "black" if rgb == (0, 0, 0) else "white" if rgb == (255, 255, 255) else f"of one colour {rgb}"
        return f"{shown} is {colour} everywhere: it says nothing about its image"
    return None


def shape_problem(shown: str, size: tuple[int, int], picture: Picture, info: PictureInfo) -> str | None:
    """Sentence on a file of this (width, height) next to an image of another shape; None where their crops fit."""
    width, height = size
    if abs(width * info.height / (height * info.width) - 1) <= SHAPE_TOLERANCE:
        return None
    return (
        f"{shown} is {width} x {height} and its image {printable(picture.name)} {info.width} x {info.height}: another"
        " shape, so their crops would not fit"
    )


def find_masks(folders: Sequence[CheckedFolder], settings: IndexSettings, report: DataReport) -> list[Path | None]:
    """The mask file with the name of each accepted image for training, suffix aside; None for one without a mask.

    What is wrong with the folder or with masks in it is added to the report's findings.
    """
    accepted = [pair for each in folders if each.role == "train" for pair in each.accepted]
    folder = settings.mask_folder
    if settings.use_alpha_mask and folder is None and accepted:
        some = any(has_alpha(picture.path) for picture, _ in accepted)
        said = (
            "the alpha channel of each image that has one" if some else "no image has an alpha channel: all is learned"
        )
        report.notes.append(f"masks: {said}")
    if folder is None or not accepted:
        return [None] * len(accepted)
    if not folder.is_dir():
        said = f"mask_dir {printable(folder)} does not exist"
        report.findings.append(Finding(said, "set data.init_args.mask_dir to a folder", stops=True))
        return [None] * len(accepted)
    by_name: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(".") and looks_like_a_picture(path):
            by_name.setdefault(path.relative_to(folder).with_suffix("").as_posix(), []).append(path)
    if several := [" and ".join(map(printable, paths)) for paths in by_name.values() if len(paths) > 1]:
        said = f"{len(several)} names in {printable(folder)} have two masks or more"
        report.findings.append(Finding(said, "keep one of each", several, stops=True))
    found = [by_name.get(Path(picture.name).with_suffix("").as_posix()) for picture, _ in accepted]
    masks = [paths[0] if paths else None for paths in found]
    report.masks, report.images_for_masks = sum(mask is not None for mask in masks), len(masks)
    if not report.masks:
        example = printable(Path(accepted[0][0].name).with_suffix(".png"))
        said = f"no mask in {printable(folder)} has the name of an image, such as {example}"
        report.findings.append(Finding(said, "rename them or remove data.init_args.mask_dir", stops=True))
    pairs = [(mask, *pair) for mask, pair in zip(masks, accepted, strict=True) if mask is not None]
    if problems := list(filter(None, (_mask_problem(*pair) for pair in pairs))):
        said = f"{len(problems)} of {report.masks} masks in {printable(folder)} cannot be used"
        advice = "make each again from its image as it is seen, white where it is learned, or remove the mask"
        report.findings.append(Finding(said, advice, problems, stops=True))
    return masks


def _mask_problem(path: Path, picture: Picture, info: PictureInfo) -> str | None:
    shown = f"the mask {printable(path)}"
    try:
        image = load_mask(path)
    except (Exception, PictureRejectedError) as error:
        return f"{shown} cannot be read: {printable(str(error))}"
    if problem := shape_problem(shown, image.size, picture, info):
        is_turned = shape_problem(shown, (image.height, image.width), picture, info) is None
        return problem + (" (an image is turned as its EXIF data says)" if is_turned else "")
    if image.getextrema()[1] == 0:
        return f"{shown} is black everywhere: nothing to learn"
    return None
