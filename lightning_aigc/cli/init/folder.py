"""Summary of a folder of images: sizes, captions, unusable files, and a trigger word."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_aigc.data.images.verify import PictureVerifier
from lightning_aigc.data.index.filenames import printable
from lightning_aigc.data.index.sources import TABLES, FoundPictures, find_pictures, repeats_of
from lightning_aigc.data.report.findings import Finding, some
from lightning_aigc.errors import ConfigError, DataError

MAX_PIXELS = 178_000_000
"""ImageCaptionData's default for max_image_pixels."""
RARE_FROM = 45_000
"""CLIP's vocabulary is sorted by frequency: words that are one token below this id have a meaning of their own."""
SOURCES = ("before", "source", "sources", "control", "input", "inputs")
TARGETS = ("after", "target", "targets", "output", "outputs", "edited")
"""Names of folders with the images before and after an edit."""
_WORD = re.compile(r"[^\W\d_]\w*")


@dataclass(frozen=True)
class FolderSummary:
    """The usable images of a folder and what is said about them."""

    folder: str
    """The folder as the user gave it."""
    sizes: list[tuple[int, int]]
    """Width and height of each usable image."""
    captions: list[str | None]
    """The caption of each usable image."""
    rejected: list[tuple[str, str]]
    """Name and reason of each image that cannot be used."""
    orphans: list[str]
    """Captions that match no image."""
    caption_extension: str = ".txt"
    """Ending of the caption files."""
    encoding: str | None = None
    """Encoding of the caption files that are not UTF-8."""
    trigger_folder: str | None = None
    """Name of the only folder like kohya's `10_zorp cup` that images are in."""
    source_folder: str | None = None
    """The folder with the images that edits start from."""
    sources: int = 0
    """Source images of each image; 0 where they are no pairs of an edit."""
    notes: Sequence[str] = ()
    """Sentences on how the captions were read, and on files that were not."""

    @property
    def written(self) -> list[str]:
        """The captions that are there."""
        return [caption for caption in self.captions if caption]

    @property
    def side(self) -> int:
        """The median over images of the side of a square of the same area, in pixels."""
        return int(statistics.median((width * height) ** 0.5 for width, height in self.sizes))


def pair_folders(given: str) -> tuple[str, str] | None:
    """The folders of targets and of sources below a folder that has both, such as `after` and `before`; else None."""
    folder = Path(given).expanduser()
    names = {path.name.casefold(): path for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else {}
    targets, sources = ([names[name] for name in known if name in names] for known in (TARGETS, SOURCES))
    return (str(targets[0]), str(sources[0])) if targets and sources else None


def find_captioned(given: str) -> tuple[FoundPictures, str]:
    """The folder's images with their captions, as training will find them, and the ending of its caption files.

    Raises: ConfigError or DataError for no folder, no image, or captions that cannot be read.
    """
    folder = Path(given).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"the image folder {printable(given)} {what}; give the folder that holds your images")
    folder = folder.absolute()
    extension = _caption_extension(folder)
    found = find_pictures(folder, extension, "text", 1)
    if not found.pictures:
        others = found.other_files + len(found.orphan_captions)
        there = f"{others} other files are there" if others else "it is empty"
        raise DataError(
            f"no images in {printable(given)} ({there}); put .jpg, .png or .webp images of your product there"
        )
    if problems := found.caption_problems:
        finding = Finding(
            f"{len(problems)} captions in {printable(given)} cannot be read", "correct each of them", problems
        )
        raise DataError(printable(finding.sentence()))
    return found, extension


def inspect_folder(given: str, cache_dir: Path) -> FolderSummary:
    """Find, decode and caption the folder's images, as training will.

    Raises: ConfigError or DataError for no folder, no image, or none that can be read.
    """
    pair = pair_folders(given)
    given, source_folder = (given, None) if pair is None else pair
    found, extension = find_captioned(given)
    folder = found.folder
    results = PictureVerifier(folder, cache_dir, MAX_PIXELS).verify([p.path for p in found.pictures], True)
    sizes, captions, rejected = [], [], []
    for picture, result in zip(found.pictures, results, strict=True):
        if isinstance(result, str):
            rejected.append((printable(picture.name), printable(result)))
        else:
            sizes.append((result.width, result.height))
            captions.append(picture.caption)
    if not sizes:
        name, reason = rejected[0]
        raise DataError(
            f"none of the {len(rejected)} images in {printable(given)} can be read ({name}: {reason}); export them"
            " again as .jpg or .png"
        )
    orphans = [printable(name) for name in found.orphan_captions]
    kohya = {repeats_of(folder, picture.name) for picture in found.pictures} - {(1, None)}
    trigger_folder = "{}_{}".format(*kohya.pop()) if len(kohya) == 1 else None
    notes = [*found.notes, *_unread(found)]
    listed = max(len(picture.sources) for picture in found.pictures)
    return FolderSummary(
        given,
        sizes,
        captions,
        rejected,
        orphans,
        extension,
        found.encoding,
        trigger_folder,
        source_folder,
        listed or int(source_folder is not None),
        notes,
    )


def _caption_extension(folder: Path) -> str:
    """The ending that most of the folder's caption files have, `.txt` where other captions are there."""
    pictures = find_pictures(folder, ".txt", "text", 1).pictures
    others = Counter(picture.other_caption for picture in pictures if picture.other_caption is not None)
    ending, count = others.most_common(1)[0] if others else (".txt", 0)
    return ending if count > sum(picture.caption is not None for picture in pictures) else ".txt"


def _unread(found: FoundPictures) -> Iterator[str]:
    """Sentences on caption files of another ending, and on tables of another name, where images have no caption."""
    others = Counter(picture.other_caption for picture in found.pictures if picture.other_caption is not None)
    for ending, count in others.items():
        yield f"{count} images have a caption in a {ending} file, which is not read: rename these files"
    if found.unread_tables and any(picture.caption is None for picture in found.pictures):
        names = some(found.unread_tables)
        yield f"not read because of their names: {names}; captions are read from {', '.join(TABLES)}"


def shared_trigger_word(captions: Sequence[str]) -> str | None:
    """The first rare word that every caption has; None where they share none, or with fewer than two captions."""
    if len(captions) < 2:
        return None
    shared = set.intersection(*({word.casefold() for word in _WORD.findall(caption)} for caption in captions))
    words = [word for word in _WORD.findall(captions[0]) if len(word) > 1 and word.casefold() in shared]
    return next(filter(is_rare, words), None)


def made_up_trigger_word(folder: str, captions: Sequence[str]) -> str:
    """A rare word from the consonants of the folder's name, in no caption; the same for the same folder."""
    letters = re.sub(r"[^a-z]", "", Path(folder).absolute().name.casefold())
    word = letters[:1] + re.sub(r"[aeiou]", "", letters[1:])
    digest = sha256(str(Path(folder).absolute().name).encode("utf-8", errors="replace")).digest()
    spare = iter("bcdfgklmnprstvwxz"[byte % 17] for byte in digest)
    word = word[:5]
    taken = {found.casefold() for caption in captions for found in _WORD.findall(caption)}
    while len(word) < 3 or word in taken or not is_rare(word):
        word += next(spare)
    return word


def is_rare(word: str) -> bool:
    """Whether CLIP's vocabulary has no token for the whole word, or one of its rarest."""
    tokens = _tokenizer().encode(word.casefold())
    return len(tokens) > 1 or (len(tokens) == 1 and tokens[0] >= RARE_FROM)


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    from open_clip.tokenizer import SimpleTokenizer

    return SimpleTokenizer()
