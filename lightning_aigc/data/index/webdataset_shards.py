"""Read images and captions from webdataset shards, and expand the names of shards.

Members of a sample share the name before the first dot, webdataset's key. An image whose name has more dots
(`photo.v2.jpg`) is a sample of its own where it has a caption of its own (`photo.v2.txt`), else one of the key's parts.
`photo.source.jpg` is the image that an edit starts from, `photo.source_1.jpg` and `photo.source_2.jpg` several, and
`photo.target.txt` describes `photo.jpg`, the image after the edit.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_aigc.data.captions.encodings import decode_text
from lightning_aigc.data.captions.listed_captions import TARGET_KEYS
from lightning_aigc.data.images.image_file import PICTURE_SUFFIXES
from lightning_aigc.errors import DataError

CAPTIONS = ("txt", "text", "caption")
SOURCE = re.compile(r"(?:(.*)\.)?source(?:_(\d+))?")
"""Infix of an image that an edit starts from: that of its image, and its number."""

TARGET = re.compile(r"(?:(.*)\.)?target")
"""Infix of a text that describes an edit's target: that of its image."""


class Sample(NamedTuple):
    """An image's bytes, its name without the suffix, its caption, and of an edit the sources' bytes and a text."""

    image: bytes
    name: str
    caption: str | None
    sources: tuple[bytes, ...] = ()
    description: str = ""
    """A text of what the image shows, where the caption is an instruction."""


def read_shard(shard: Path, caption_extension: str, caption_key: str, encoding: str | None = None) -> Iterator[Sample]:
    """Yield every image of a tar file with its caption. Raises: DataError for a JSON that is none, and tarfile's."""
    with tarfile.open(shard) as tar:
        key, parts = "", dict[str, bytes]()
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            directory, _, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            if file is None or not stem:
                continue
            if f"{directory}/{stem}" != key:
                yield from _samples_of(parts, key, shard, caption_extension, caption_key, encoding)
                key, parts = f"{directory}/{stem}", {}
            parts[extension] = file.read()
        yield from _samples_of(parts, key, shard, caption_extension, caption_key, encoding)


def _samples_of(
    parts: Mapping[str, bytes],
    key: str,
    shard: Path,
    caption_extension: str,
    caption_key: str,
    encoding: str | None,
) -> Iterator[Sample]:
    """The samples of one key. `parts` are by the rest of their names: `jpg`, or `v2.jpg` with the infix `v2`."""
    by_infix: dict[str, dict[str, bytes]] = {}
    for rest, content in parts.items():
        infix, extension = _split(rest, caption_extension)
        by_infix.setdefault(infix, {})[extension] = content
    images: dict[str, bytes] = {}
    captions: dict[str, str | None] = {}
    sources: dict[str, list[tuple[int, bytes]]] = {}
    descriptions: dict[str, str] = {}
    for infix, found in by_infix.items():
        image = next((content for extension, content in found.items() if f".{extension}" in PICTURE_SUFFIXES), None)
        match = SOURCE.fullmatch(infix)
        if match is not None and image is not None:
            sources.setdefault(match[1] or "", []).append((int(match[2] or 0), image))
        elif image is not None:
            images[infix] = image
        text = next((found[name] for name in (caption_extension, *CAPTIONS) if name in found), None)
        target = TARGET.fullmatch(infix) if image is None else None
        if "json" in found:
            row = _row_of_json(found["json"], f"{key}.{infix}".rstrip("."), shard, is_needed=text is None)
            captions[infix] = _text_of(row, (caption_key, "caption"))
            descriptions.setdefault(infix, _text_of(row, TARGET_KEYS) or "")
        if text is not None and target is not None:
            descriptions[target[1] or ""] = decode_text(text, encoding)[0]
        elif text is not None:
            captions[infix] = decode_text(text, encoding)[0]
    # Of images without a caption of their own, such as `000.jpg` and `000.depth.png`, one belongs to the key's caption.
    without = [infix for infix in images if infix not in captions or infix == ""]
    if without and ("" in images or "" in captions):
        without = ["" if "" in images else without[0]]
    for infix, image in images.items():
        if infix in without or infix in captions:
            name = f"{key}.{infix}" if infix else key
            caption = captions.get(infix if infix in captions else "")
            own = tuple(content for _, content in sorted(sources.get(infix, [])))
            description = descriptions.get(infix, "" if infix in captions else descriptions.get("", ""))
            yield Sample(image, name, caption, own, description)


def _split(rest: str, caption_extension: str) -> tuple[str, str]:
    """The infix and the extension in lower case; the captions' may have dots of its own.

    >>> _split("v2.JPG", "txt"), _split("jpg", "txt"), _split("v2.tags.txt", "tags.txt")
    (('v2', 'jpg'), ('', 'jpg'), ('v2', 'tags.txt'))
    """
    if f".{rest.lower()}".endswith(f".{caption_extension}"):
        return rest[: -len(caption_extension)].rstrip("."), caption_extension
    infix, _, extension = rest.rpartition(".")
    return infix, extension.lower()


def _row_of_json(content: bytes, name: str, shard: Path, *, is_needed: bool) -> Mapping[str, Any]:
    """The object; empty for something else, and for no JSON at all where the caption is in a text file."""
    try:
        found = json.loads(content)
    except ValueError as error:
        if not is_needed:
            return {}
        raise DataError(f"{name}.json in the shard {shard} is not valid JSON: {error}; make the shard again") from error
    return found if isinstance(found, dict) else {}


def _text_of(row: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """The text under the first of these keys that the row has; None for another value."""
    value = next((row[key] for key in keys if key in row), None)
    return value if isinstance(value, str) else None


def expand(pattern: str) -> list[Path]:
    """The paths that match a pattern: {000..009} and {a,b} as in a shell, then * and ?."""
    texts = [str(Path(pattern).expanduser())]
    while any(_brace(text) for text in texts):
        texts = [expanded for text in texts for expanded in (_expand_brace(text) if _brace(text) else [text])]
    paths: list[Path] = []
    for text in texts:
        path = Path(text)
        if any(sign in text for sign in "*?"):
            found = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor) if path.anchor else path)))
            if not found:
                raise DataError(f"no shard matches {text!r}; set data.init_args.shards to .tar files")
            paths += found
        else:
            paths.append(path)
    return paths


def _brace(text: str) -> re.Match[str] | None:
    return re.search(r"\{([^{}]*(?:\.\.|,)[^{}]*)\}", text)


def _expand_brace(text: str) -> list[str]:
    match = _brace(text)
    assert match is not None
    inner = match[1]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", inner)
    if span is None:
        values = inner.split(",")
    else:
        width = len(span[1]) if span[1].startswith("0") else 1
        values = [f"{number:0{width}d}" for number in range(int(span[1]), int(span[2]) + 1)]
    if not values or (span is None and ".." in inner):
        raise DataError(f"cannot expand {match[0]!r} in {text!r}; write shards as data/{{000..009}}.tar")
    return [text[: match.start()] + value + text[match.end() :] for value in values]
