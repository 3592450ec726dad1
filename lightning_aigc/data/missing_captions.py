"""Handle pictures without a caption and captions without a picture, as `missing_captions` says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_aigc.data.choices import MissingCaptions
from lightning_aigc.data.names import printable
from lightning_aigc.data.sources import FoundPictures, Picture
from lightning_aigc.errors import DataError


def fill_captions(
    found: FoundPictures, used: Sequence[Picture], switch: MissingCaptions, caption_extension: str, trigger_word: str
) -> int:
    """Give every used picture a caption. Returns: the number of pictures that had none.

    Raises: DataError under "error", naming pictures without a caption or captions without a picture.
    """
    without = [picture for picture in used if picture.caption is None]
    if switch == "error" and without:
        raise DataError(
            f"{len(without)} of {len(used)} pictures in {printable(found.folder)} have no caption: "
            f"{_some(picture.name for picture in without)}. Put the text of each in a file of the same name ending in "
            f"{caption_extension}, in metadata.jsonl or in captions.csv, "
            "or set data.init_args.missing_captions to filename, empty or trigger"
        )
    _report_orphans(found, switch)
    for picture in without:
        if switch == "filename":
            picture.caption = " ".join(printable(Path(picture.name).stem).replace("_", " ").split())
        else:
            picture.caption = trigger_word if switch == "trigger" else ""
    return len(without)


def fill_class_captions(
    found: FoundPictures, used: Sequence[Picture], switch: MissingCaptions, class_prompt: str | None
) -> None:
    """Caption every class picture that has none with `class_prompt`. Raises: DataError if that is None."""
    without = [picture for picture in used if picture.caption is None]
    if without and class_prompt is None:
        raise DataError(
            f"{len(without)} of {len(used)} class pictures in {printable(found.folder)} have no caption: "
            f"{_some(picture.name for picture in without)}. Give them captions, or set data.init_args.class_prompt"
        )
    _report_orphans(found, switch)
    for picture in without:
        picture.caption = class_prompt


def _report_orphans(found: FoundPictures, switch: MissingCaptions) -> None:
    orphans = found.orphan_captions
    if orphans and switch == "error":
        raise DataError(
            f"{len(orphans)} captions in {printable(found.folder)} match no picture: {_some(orphans)}. Add the "
            "pictures or move these captions away, or set data.init_args.missing_captions to filename, empty or trigger"
        )
    found.notes += [f"{printable(name)}: a caption that matches no picture" for name in orphans]


def _some(names: Iterable[str]) -> str:
    listed = [printable(name) for name in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
