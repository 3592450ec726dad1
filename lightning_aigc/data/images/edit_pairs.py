"""Pair each image with its source images, which an edit starts from: files of its name, or those that a table lists."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_aigc.data.images.conditions import UNMATCHED, shape_problem
from lightning_aigc.data.images.crop import Sample, SourceImage
from lightning_aigc.data.images.image_file import PictureInfo, looks_like_a_picture
from lightning_aigc.data.images.verify import PictureVerifier
from lightning_aigc.data.index.checked_folder import CheckedFolder
from lightning_aigc.data.index.filenames import printable
from lightning_aigc.data.index.index_settings import IndexSettings
from lightning_aigc.data.index.sources import Picture
from lightning_aigc.data.loader.buckets import BucketSettings, Placement, bucket_shapes, place
from lightning_aigc.data.report.findings import Finding

SMALLEST_SIDE, LONGEST_RATIO = 64, 8
"""Limits on a source in pixels and as longer by shorter side, which FLUX.2's pipeline refuses too."""
REPEATED_FROM = 20
"""Pairs from which one instruction for all is reported."""
REMEDY = "give every image a source of its name in data.init_args.source_data_dir, or leave the image out"
LISTED_REMEDY = "list a source for every image in metadata.jsonl or captions.csv, or leave the image out"
NUMBERED = re.compile(r"(.+)_(\d{1,4})")


def has_pairs(folders: Sequence[CheckedFolder], settings: IndexSettings) -> bool:
    """Whether the data has source images, in folders or listed."""
    return bool(settings.source_folders) or any(p.sources for each in folders for p in each.used)


def pair_sources(folders: Sequence[CheckedFolder], settings: IndexSettings) -> Iterator[Finding]:
    """Set `sources` and `source_infos` of the accepted images; yields what is missing or cannot be used."""
    if not has_pairs(folders, settings):
        return
    absent = [folder for folder in settings.source_folders if not folder.is_dir()]
    if absent:
        said = f"source_data_dir {printable(absent[0])} does not exist"
        yield Finding(said, "set data.init_args.source_data_dir to a folder", stops=True)
        return
    if any(each.role == "class" for each in folders):
        said = "class images have no source images, so they cannot be trained with pairs of an edit"
        yield Finding(said, "set data.init_args.class_data_dir: null", stops=True)
        return
    by_name = [_files_by_name(folder) for folder in settings.source_folders]
    unused = {path for names in by_name for path in names.values()}
    for each in folders:
        if by_name:
            own = {_stem(picture.name) for picture in each.used}
            for picture in each.used:
                picture.sources = _sources_of(_stem(picture.name), by_name, own)
                unused.difference_update(picture.sources)
        yield from _missing(each, REMEDY if by_name else LISTED_REMEDY)
        yield from _inspect(each, settings)
    if unused:
        names = ", ".join(printable(path) for path in sorted(unused)[:3])
        yield Finding(f"{len(unused)} sources match no image, such as {names}", UNMATCHED.format("sources"), stops=True)


def _files_by_name(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".") and looks_like_a_picture(path)
    }


def _stem(name: str) -> str:
    return Path(name).with_suffix("").as_posix()


def _sources_of(stem: str, by_name: Sequence[Mapping[str, Path]], own: set[str]) -> tuple[Path, ...]:
    """The sources of an image: one from each folder, or of one folder all that are numbered `name_0`, `name_1`."""
    found: list[Path] = []
    for names in by_name:
        if stem in names:
            found.append(names[stem])
        elif len(by_name) == 1:
            numbered = [(m, path) for name, path in names.items() if (m := NUMBERED.fullmatch(name)) and m[1] == stem]
            mine = sorted((int(m[2]), path) for m, path in numbered if m[0] not in own)
            found += [path for _, path in mine]
    return tuple(found)


def _missing(folder: CheckedFolder, remedy: str) -> Iterator[Finding]:
    """Images without a source, and images with more or fewer than the others."""
    missing = [picture.name for picture in folder.used if not picture.sources]
    if missing:
        names = ", ".join(printable(name) for name in missing[:3])
        said = f"{len(missing)} of {len(folder.used)} images in {folder.shown} have no source, such as {names}"
        yield Finding(said, remedy, stops=True)
    counts = Counter(len(picture.sources) for picture in folder.used if picture.sources)
    if len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        odd = next(picture for picture in folder.used if len(picture.sources) not in (0, usual))
        said = (
            f"{printable(odd.name)} has {len(odd.sources)} sources and most images in {folder.shown} have {usual}: a"
            " batch needs equally many"
        )
        yield Finding(said, "train each number of sources on its own, or add the missing ones", stops=True)


def _inspect(folder: CheckedFolder, settings: IndexSettings) -> Iterator[Finding]:
    """Decode every source once and check it against its image."""
    paths = sorted({path for picture in folder.used for path in picture.sources})
    if not paths:
        return
    verifier = PictureVerifier(folder.found.folder / "sources", settings.cache_dir, settings.max_image_pixels)
    results = dict(zip(paths, verifier.verify(paths), strict=True))
    problems: list[str] = []
    equal: list[str] = []
    for picture, info in folder.accepted:
        infos: list[PictureInfo] = []
        for path in picture.sources:
            result = results[path]
            problem = _problem(path, result, picture, info, settings)
            if problem is not None:
                problems.append(problem)
            if isinstance(result, PictureInfo):
                infos.append(result)
        picture.source_infos = tuple(infos)
        if len(infos) == 1 and infos[0].content_sha256 == info.content_sha256:
            equal.append(printable(picture.name))
    if problems:
        advice = "make these sources again, or leave their images out"
        if any("another shape" in problem for problem in problems):
            advice += "; for references of their own shape set data.init_args.source_fit: own"
        yield Finding(f"{len(problems)} sources of {folder.shown} cannot be used", advice, problems, stops=True)
    if equal:
        is_all = len(equal) == len(folder.used)
        said = f"{len(equal)} of {len(folder.used)} images in {folder.shown} are equal to their source"
        advice = "nothing changes, so there is nothing to learn: give the image before the edit as its source"
        if not is_all:
            advice = "they teach to change nothing, which keeps what should stay; leave them out if that is not meant"
        yield Finding(said, advice, equal, stops=is_all)
    yield from _repeated(folder)


def _repeated(folder: CheckedFolder) -> Iterator[Finding]:
    """One instruction for all pairs."""
    captions = Counter(picture.caption for picture in folder.used if picture.caption)
    if len(folder.used) >= REPEATED_FROM and len(captions) == 1:
        said = f"all {len(folder.used)} pairs in {folder.shown} have one instruction, {next(iter(captions))!r}"
        yield Finding(said, "the edit will then follow any instruction; name in each what it changes, if they differ")


def _problem(
    path: Path, result: PictureInfo | str, picture: Picture, info: PictureInfo, settings: IndexSettings
) -> str | None:
    shown = f"the source {printable(path)}"
    if isinstance(result, str):
        return f"{shown} of {printable(picture.name)} cannot be read: {printable(result)}"
    if said := size_problem(result.width, result.height):
        return f"{shown} is {said}"
    if settings.source_fit == "crop":
        return shape_problem(shown, (result.width, result.height), picture, info)
    return None


def size_problem(width: int, height: int) -> str | None:
    """The reason why an image of this size cannot be a source; None where it can.

    >>> size_problem(1024, 100)
    '1024 x 100 pixels, with one side more than 8 times the other'
    """
    if min(width, height) < SMALLEST_SIDE:
        return f"{width} x {height} pixels, a side must have at least {SMALLEST_SIDE}"
    if max(width, height) > LONGEST_RATIO * min(width, height):
        return f"{width} x {height} pixels, with one side more than {LONGEST_RATIO} times the other"
    return None


def place_sources(sample: Sample, picture: Picture, settings: IndexSettings) -> Sample:
    """The sample with its sources, each cut as the image is (`crop`), or to a bucket of its own shape (`own`)."""
    own = settings.buckets
    if settings.source_resolution is not None:
        own = replace(own, resolution=settings.source_resolution)
    sources = tuple(
        SourceImage(path, info.content_sha256, _placement(sample, info, settings, own))
        for path, info in zip(picture.sources, picture.source_infos, strict=True)
    )
    return replace(sample, sources=sources, description=picture.description)


def _placement(sample: Sample, info: PictureInfo, settings: IndexSettings, own: BucketSettings) -> Placement:
    if settings.source_fit == "crop":
        return sample.placement
    return place(info.width, info.height, own, bucket_shapes(own))
