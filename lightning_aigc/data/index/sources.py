"""Find the images of a folder and their captions, from metadata.jsonl, else captions.csv, else sidecar files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lightning_aigc.data.captions.caption_files import CaptionFiles
from lightning_aigc.data.captions.captions import clean_caption
from lightning_aigc.data.captions.listed_captions import CAPTION_KEY, UNREAD, ListedCaptions
from lightning_aigc.data.images.image_file import PICTURE_SUFFIXES, PictureInfo, looks_like_a_picture
from lightning_aigc.data.index.filenames import comparable, printable
from lightning_aigc.errors import DataError

_REPEATS = re.compile(r"([1-9]\d{0,2})_(.+)")  # kohya's `10_name`; three digits at most, so `2024_summer` is a name
TABLES = ("metadata.jsonl", "captions.csv", "metadata.csv")
"""Files that list the captions of many images; earlier ones take precedence."""
CAPTION_SUFFIXES = (".txt", ".caption", ".cap", ".text", ".tags", ".prompt")
"""Usual endings of caption files; one that is not `caption_extension` is noticed where its image has no caption."""
TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".xlsx", ".parquet")
"""Endings of files that may list captions under another name."""


@dataclass
class Picture:
    """One image file; `name` is its path relative to the folder."""

    path: Path
    name: str
    caption: str | None = None
    repeats: int = 1
    empty_caption: str | None = None
    """Place of a caption without text."""
    condition: Path | None = None
    """The condition that metadata.jsonl lists for it."""
    sources: tuple[Path, ...] = ()
    """The images that an edit starts from, in order."""
    description: str | None = None
    """Description of the image, where its caption is the instruction of an edit."""
    source_infos: tuple[PictureInfo, ...] = ()
    """Results of decoding them."""
    other_caption: str | None = None
    """Ending of the caption file of an image without a caption, where `caption_extension` is another."""


@dataclass
class FoundPictures:
    """Contents of a folder: images in order of their names, captions that match no image, and notes."""

    folder: Path
    pictures: list[Picture]
    orphan_captions: list[str] = field(default_factory=list)
    caption_problems: list[str] = field(default_factory=list)
    """Captions that cannot be read or contradict each other, a sentence each."""
    other_files: int = 0
    notes: list[str] = field(default_factory=list)
    unread_tables: list[str] = field(default_factory=list)
    """Files that may list captions, and are not read because of their names."""
    encoding: str | None = None
    """Encoding of the caption files that are not UTF-8."""


def find_pictures(
    folder: Path,
    caption_extension: str,
    caption_key: str,
    num_repeats: int,
    excluded: tuple[Path, ...] = (),
    argument: str = "train_data_dir",
    encoding: str | None = None,
) -> FoundPictures:
    """Find all candidate images below a folder with their captions, without hidden files and `excluded` folders.

    Raises: DataError for a folder that does not exist or cannot be listed; `argument` is what set it.
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(f"the image folder {printable(folder)} {what}; set data.init_args.{argument} to a folder")
    files = list(_walk(folder, excluded))
    found = FoundPictures(folder, [])
    sidecars: dict[str, Path] = {}
    others: dict[str, Path] = {}
    tables = []
    for path in files:
        lower = path.name.lower()
        if lower in TABLES:
            tables.append(path)
        elif lower.endswith(caption_extension.lower()):
            _add_sidecar(sidecars, path, len(caption_extension), caption_extension)
        elif looks_like_a_picture(path):
            name = path.relative_to(folder).as_posix()
            found.pictures.append(Picture(path, name, repeats=repeats_of(folder, name)[0] * num_repeats))
        else:
            found.other_files += 1
            if path.suffix.lower() in CAPTION_SUFFIXES:
                others[str(path.with_suffix(""))] = path
            elif path.suffix.lower() in TABLE_SUFFIXES:
                found.unread_tables.append(printable(path.relative_to(folder).as_posix()))
    texts = CaptionFiles(folder, [*tables, *sidecars.values()], encoding, found.notes, found.caption_problems)
    found.encoding = texts.encoding
    if caption_key != CAPTION_KEY and not tables and argument == "train_data_dir":
        found.notes.append(
            f"data.init_args.caption_column: {caption_key} changes nothing, because none of {', '.join(TABLES)} is"
            f" in {printable(folder)}; remove caption_column"
        )
    captions = ListedCaptions(folder, caption_key, found.notes, found.caption_problems)
    for path in tables:
        read = captions.read_jsonl if path.suffix.lower() == ".jsonl" else captions.read_csv
        read(path, texts.text(path) or "")
    _give_captions(found, captions, sidecars, texts)
    for picture in found.pictures:
        found_others = (others.get(key) for key in (str(picture.path.with_suffix("")), str(picture.path)))
        other = next(filter(None, found_others), None)
        if other is not None and picture.caption is None and picture.empty_caption is None:
            picture.other_caption = other.suffix
    return found


def _walk(folder: Path, excluded: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files below a folder in sorted order; links are followed, each real folder once."""
    seen = {path.resolve() for path in excluded}

    def fail(error: OSError) -> None:
        raise DataError(f"cannot list {printable(error.filename)}: {error.strerror}; make it readable or move it away")

    for current, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        here = Path(current)
        real = here.resolve()
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__MACOSX")
        for name in sorted(files):
            if not name.startswith(".") and name.lower() not in {"thumbs.db", "desktop.ini"}:
                yield here / name


def repeats_of(folder: Path, name: str) -> tuple[int, str | None]:
    """Repeats and name of the nearest folder above an image that is called like kohya's `10_zorp cup`; else 1, None."""
    for part in reversed([folder.name, *name.split("/")[:-1]]):
        if match := _REPEATS.match(part):
            return int(match[1]), match[2]
    return 1, None


def _add_sidecar(sidecars: dict[str, Path], path: Path, extension_length: int, extension: str) -> None:
    key = str(path)[:-extension_length]
    if key in sidecars:  # a.txt and a.TXT: the exact spelling wins
        if path.name.endswith(extension):
            sidecars[key] = path
        return
    sidecars[key] = path


def _give_captions(
    found: FoundPictures, captions: ListedCaptions, sidecars: dict[str, Path], texts: CaptionFiles
) -> None:
    by_stem: dict[str, Picture] = {}
    listed_conditions = {path.resolve() for path in captions.conditions.values()}
    if listed_conditions:  # they may lie among the images
        found.pictures = [picture for picture in found.pictures if picture.path.resolve() not in listed_conditions]
    listed_sources = {path.resolve() for paths in captions.sources.values() for path in paths}
    if listed_sources:  # an image of the table may be the source of another
        found.pictures = [p for p in found.pictures if captions.lists(p.name) or p.path.resolve() not in listed_sources]
    for picture in found.pictures:
        picture.condition = captions.conditions.get(comparable(picture.name))
        picture.sources = captions.sources.get(comparable(picture.name), ())
        picture.description = captions.descriptions.get(comparable(picture.name))
        listed = captions.take(picture.name)
        keys = [str(picture.path.with_suffix("")), str(picture.path)]
        if picture.path.suffix.lower() not in PICTURE_SUFFIXES:  # `photo.v2`, an image without a suffix
            keys.reverse()
        sidecar = next((sidecars[key] for key in keys if key in sidecars), None)
        if listed is not None:
            text, where = listed
        elif sidecar is not None:
            if (other := by_stem.get(str(sidecar))) is not None:
                found.caption_problems.append(
                    f"{other.name} and {picture.name} share the caption file {sidecar.name}; rename one and give it a"
                    " caption file as well, or list both in metadata.jsonl"
                )
            by_stem[str(sidecar)] = picture
            content = texts.text(sidecar)  # of one that cannot be read, a problem stops the training
            text, where = UNREAD if content is None else clean_caption(content), sidecar.name
        else:
            continue
        picture.caption, picture.empty_caption = (text, None) if text else (None, where)
    # A sidecar is no orphan if an image has its name, even if that image's caption came from another source.
    names = {str(picture.path) for picture in found.pictures}
    names |= {str(picture.path.with_suffix("")) for picture in found.pictures}
    orphans = [path.relative_to(found.folder).as_posix() for key, path in sidecars.items() if key not in names]
    found.orphan_captions = [*captions.unused(), *orphans]
